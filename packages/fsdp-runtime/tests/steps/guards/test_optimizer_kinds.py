"""LBFGS steps shards of equal size as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_runtime import parallelize
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

EVEN = 132


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _errors(axes: dict[str, int]) -> float:
    plain: Any = tiny_model("Qwen3ForCausalLM", vocab_size=EVEN)
    sharded = parallelize(copy.deepcopy(plain), mesh_for(axes))
    ids = tiny_inputs(plain, batch=2, length=5)["input_ids"]
    for model in (plain, sharded):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = _whole_with_gradient(model(ids, use_cache=False).logits).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return max(float((_whole(one) - other).abs().max()) for one, other in pairs)


def _whole_with_gradient(logits: Tensor) -> Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_lbfgs_steps_shards_of_equal_size(two_ranks: RankPool, axes: dict[str, int]) -> None:
    assert max(two_ranks.run(_errors, axes)) < 1e-6
