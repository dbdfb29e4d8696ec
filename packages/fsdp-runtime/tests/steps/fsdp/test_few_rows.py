"""Parameters with fewer rows than FSDP2 has ranks, as merged experts have, are shared among all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig, MixtralForCausalLM

from fsdp_runtime import load_training_state, load_weights, parallelize, save_training_state, stream_weights
from harness.models import jitter, tiny_inputs
from harness.parity import mesh_for
from harness.ranks import RankPool

MESHES = ({"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})


def _model(seed: int = 0, *, experts: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=130,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=1,
        tie_word_embeddings=False,
        experts_implementation="eager",  # transformers' grouped products have no float64
    )
    model = MixtralForCausalLM(config).double().train()
    jitter(model)
    return model


def _shares(axes: dict[str, int]) -> list[int]:
    """Elements of each merged expert weight on this rank, times the ranks that share it, less all elements."""
    model = parallelize(_model(experts=1 if "tp" not in axes else 2), mesh_for(axes))
    experts = [p for n, p in model.named_parameters() if n.endswith(("gate_up_proj", "down_proj")) and p.ndim == 3]
    ranks = axes.get("dp_shard", 1) * axes.get("tp", 1)
    return [p.to_local().numel() * ranks - p.numel() for p in experts if isinstance(p, DTensor)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_every_rank_holds_the_same_share_of_the_experts(four_ranks: RankPool, axes: dict[str, int]) -> None:
    assert four_ranks.run(_shares, axes) == [[0] * 4] * 4


def _errors(axes: dict[str, int], folder: Path) -> dict[str, float]:
    """How far outputs, gradients, and weights loaded, streamed, saved and resumed are from one process's, at most."""
    reference = _model()
    model = parallelize(_model(seed=1), mesh_for(axes))
    load_weights(model, folder / "weights")
    inputs = tiny_inputs(reference, batch=2, length=7)
    weights = torch.randn(2, 7, 130, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = reference(**inputs).logits
    (expected * weights).sum().backward()
    logits: Any = model(**inputs, use_cache=False).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    (logits * weights).sum().backward()
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    found = {"output": (logits - expected).abs().max().item()}
    found["gradient"] = max((gradients[n] - p.grad).abs().max().item() for n, p in reference.named_parameters())

    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.step()
    save_training_state(folder / "state", model, optimizer, step=1)
    trained = {n: t.clone() for n, t in stream_weights(model, names="model")}
    other = parallelize(_model(seed=3), mesh_for({"dp_shard": 2, "tp": 2} if "tp" not in axes else {"dp_shard": 4}))
    load_training_state(folder / "state", other, torch.optim.AdamW(other.parameters(), foreach=False))
    resumed = dict(stream_weights(other, names="model"))
    assert trained.keys() == resumed.keys()
    found["resumed"] = max((trained[name] - resumed[name]).abs().max().item() for name in trained)
    return found


@pytest.mark.parametrize(
    "axes", [MESHES[0], *(pytest.param(axes, marks=pytest.mark.slow) for axes in MESHES[1:])], ids=str
)
def test_they_compute_load_stream_save_and_resume_like_all_others(
    four_ranks: RankPool, tmp_path: Path, axes: dict[str, int]
) -> None:
    _model().save_pretrained(tmp_path / "weights")
    for found in four_ranks.run(_errors, axes, tmp_path):
        assert found["output"] < 1e-5  # Mixtral's norms and router pass through float32
        assert found["gradient"] < 1e-4
        assert found["resumed"] == 0.0
