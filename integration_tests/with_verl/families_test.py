"""Families of models on each mesh: log-probabilities of transformers' model, norms alike; run by ``nox -s verl``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from harness.ranks import RankPool

pytest.importorskip("verl", reason="verl 0.9.1 and the transformers that it takes are installed by nox -s verl only")

from with_verl import checkpoints_on_disk, drive  # after the check

_SP = {"tp": 2, "sequence_parallel": True}
_SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_DELTA = {name: value for name, value in checkpoints_on_disk._HYBRID.items() if name != "num_hidden_layers"}
#: The class of the config, what it is given, attention, and meshes.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any], str, tuple[Mapping[str, Any], ...]]] = {
    "Llama": ("LlamaConfig", {"tie_word_embeddings": True}, "sdpa", ({"tp": 2}, _SP, {"cp": 2})),
    "Gemma3": ("Gemma3TextConfig", {**_SLIDING, "query_pre_attn_scalar": 16}, "sdpa", (_SP, {"cp": 2})),
    "Glm4Moe": (
        "Glm4MoeConfig",
        {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        "sdpa",
        (_SP, {"ep": 2}, {"cp": 2}),
    ),
    "GptOss": (
        "GptOssConfig",
        {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
        "eager",
        ({"tp": 2}, _SP, {"ep": 2}, {**_SP, "ep": 2}),
    ),
    "Qwen3Next": (
        "Qwen3NextConfig",
        {**_EXPERTS, **_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
        "sdpa",
        ({"tp": 2}, {"ep": 2}, {"cp": 2}),
    ),
}


def alone(path: str, attention: str) -> list[torch.Tensor]:
    """Log-probabilities of transformers' model, one sample at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention).eval()
    found = []
    for each in drive.samples():
        ids = each["ids"][None]
        with torch.no_grad():
            scores = (model(ids, use_cache=False).logits[0, :-1].float() / 0.7).log_softmax(-1)
        found.append(scores.gather(-1, ids[0, 1:, None])[:, 0])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_on_each_mesh(family: str, two_ranks: RankPool, tmp_path: Path) -> None:
    kind, given, attention, meshes = FAMILIES[family]
    config = getattr(transformers, kind)(**{**checkpoints_on_disk.SIZES, "pad_token_id": 0, **given})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected, norms = alone(str(tmp_path), attention), []
    for mesh in ({}, *meshes):
        for packed in (True, False):
            model = {"use_remove_padding": packed, "override_config": {"attn_implementation": attention}}
            found = two_ranks.run(drive.run, drive.OURS, str(tmp_path), model=model, **mesh)[0]
            norms.append(found["norms"][0])
            for one, other in zip(expected, found["log_probs"], strict=True):
                torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5, msg=lambda m, n=mesh: f"{n}: {m}")
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
