"""Muon on any mesh takes the steps of one process with the full matrices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from coverage.table import entries, tiny_model
from fsdp_runtime import parallelize, submesh
from fsdp_runtime.optim import Muon
from harness.models import tiny_inputs
from harness.parity import largest, mesh_for, own_part
from harness.ranks import RankPool

STEPS = 5
#: AdamW divides a gradient that is rounding alone by its magnitude; the large epsilon keeps such a step small.
SETTINGS: Mapping[str, Any] = {"lr": 1e-3, "adamw_eps": 1e-3, "ns_dtype": torch.float32}
#: Meshes of two and of four ranks.
TWO = ({"dp_shard": 2}, {"tp": 2})
FOUR = ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})
EP = {"dp_shard": 4, "ep": 2}
DENSE = ("qwen3", "phi3", "deepseek_v3", "olmo_hybrid")
MIXTURES = ("qwen3_moe", "gpt_oss")


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, rows: slice, scale: int) -> None:
    inputs = {name: value[rows] for name, value in tiny_inputs(model, batch=4, length=7).items()}
    for _ in range(steps):
        logits = model(**inputs, use_cache=False).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        weights = torch.randn(4, *logits.shape[1:], generator=torch.Generator().manual_seed(2))[rows]
        (logits * weights).sum().mul(scale / 100).backward()
        optimizer.step()
        optimizer.zero_grad()


@lru_cache(maxsize=2)
def _alone(name: str) -> Mapping[str, Tensor]:
    model = tiny_model(entries()[name], dtype=torch.float32)
    optimizer = Muon(model, **SETTINGS)
    _train(model, optimizer, steps=STEPS, rows=slice(None), scale=1)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _worst(expected: Mapping[str, Tensor], model: nn.Module) -> tuple[float, str]:
    errors = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part = own_part(expected[name], parameter) if isinstance(parameter, DTensor) else expected[name]
        errors[name] = largest(local.detach() - part)
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def _on(name: str, axes: Mapping[str, int]) -> tuple[float, str]:
    mesh = mesh_for(axes)
    model = parallelize(tiny_model(entries()[name], dtype=torch.float32), mesh)
    optimizer = Muon(model, **SETTINGS)
    ranks = submesh(mesh, "dp")
    share = 4 // ranks.size()
    rows = slice(share * ranks.get_local_rank(), share * (ranks.get_local_rank() + 1))
    _train(model, optimizer, steps=STEPS, rows=rows, scale=ranks.size())
    return _worst(_alone(name), model)


@pytest.mark.parametrize("axes", TWO)
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_muon_on_two_ranks_equals_one_process(two_ranks: RankPool, name: str, axes: Mapping[str, int]) -> None:
    for error, worst in two_ranks.run(_on, name, axes):
        assert error <= 1e-6, worst


@pytest.mark.parametrize(
    ("name", "axes"), [*((name, axes) for name in ("phi3", "qwen3_moe") for axes in FOUR), ("qwen3_moe", EP)]
)
def test_muon_on_four_ranks_equals_one_process(four_ranks: RankPool, name: str, axes: Mapping[str, int]) -> None:
    for error, worst in four_ranks.run(_on, name, axes):
        assert error <= 1e-6, worst
