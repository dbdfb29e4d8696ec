"""``float8=`` of the engine's config: torchao's numbers in scores, and updates of parameters in full precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.ranks import RankPool

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # after the check
from transformers import AutoModelForCausalLM

from with_verl import checkpoints_on_disk, drive

RECIPE = "rowwise_with_gw_hp"  # the scales of a token do not depend on the tokens of its micro-batch


def _scores(path: str, *, float8: bool) -> list[torch.Tensor]:
    """The log-probabilities of every sample alone, by torchao's conversion of the blocks' layers."""
    model = AutoModelForCausalLM.from_pretrained(path).float().eval()
    if float8:
        config = replace(Float8LinearConfig.from_recipe_name(RECIPE), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: "layers" in path)
    scores = []
    for sample in drive.samples():
        ids = sample["ids"]
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0, :-1] / 0.7
        scores.append(torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0])
    return scores


def _largest(scores: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(scores, others, strict=True))


def test_float8_scores_equal_torchaos_on_every_mesh(two_ranks: RankPool, tmp_path: Path) -> None:
    path = checkpoints_on_disk.write("dense", tmp_path)
    expected = _scores(path, float8=True)
    assert _largest(expected, _scores(path, float8=False)) > 1e-2
    losses = []
    for mesh in ({}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}):
        options = {**mesh, "float8": RECIPE, "float8_emulate": True}
        updated = two_ranks.run(drive.run, drive.OURS, path, **options, timeout=500)[0]
        assert _largest(updated["log_probs"], expected) < 1e-5
        assert {weight.dtype for weight in updated["weights"].values()} == {torch.float32}
        losses.append(updated["losses"])
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-3)] * 2  # the second after an update
