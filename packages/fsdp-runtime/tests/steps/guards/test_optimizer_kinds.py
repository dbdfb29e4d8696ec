"""Optimizers that cannot step shards are refused before they change any; the others step as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_runtime import ModelError, parallelize
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

Make = Callable[..., torch.optim.Optimizer]
EVEN, UNEVEN = 132, 131

REFUSED: dict[str, Make] = {
    "Rprop": torch.optim.Rprop,
    "LBFGS": torch.optim.LBFGS,
    "Adafactor": torch.optim.Adafactor,
    "Adafactor of transformers": transformers.Adafactor,
}


def _of_shards(axes: dict[str, int]) -> list[str]:
    model = parallelize(tiny_model("Qwen3ForCausalLM", vocab_size=UNEVEN), mesh_for(axes))
    before = [_whole(parameter).clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    messages = []
    for make in REFUSED.values():
        with pytest.raises(ModelError) as refused:
            make(model.parameters()).step(lambda: torch.ones(()))  # type: ignore[arg-type, return-value]
        messages.append(str(refused.value))
    assert all(torch.equal(_whole(p), b) for p, b in zip(model.parameters(), before, strict=True))
    return messages


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_optimizers_of_full_tensors_are_refused_before_they_change_a_shard(
    two_ranks: RankPool, axes: dict[str, int]
) -> None:
    for messages in two_ranks.run(_of_shards, axes):
        for name, message in zip(REFUSED, messages, strict=True):
            assert message.startswith(name.split()[0])
            assert "as AdamW does" in message


def _fused(kind: Make) -> tuple[str, bool]:
    """The refusal of a fused step whose first tensor is plain, and whether the step left it as it was."""
    model = parallelize(tiny_model("Qwen3ForCausalLM"), mesh_for({"tp": 2}))
    head = torch.nn.Parameter(torch.ones(3))
    parameters = [head, *model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ModelError) as refused:
        kind(parameters, lr=0.1, fused=True).step()
    return str(refused.value), torch.equal(head, torch.ones(3))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_fused_steps_without_a_sharding_strategy_are_refused_before_a_plain_parameter_changes(
    two_ranks: RankPool, kind: Make
) -> None:
    for message, unchanged in two_ranks.run(_fused, kind):
        assert f"fused step of {kind.__name__} takes no DTensors" in message  # type: ignore[attr-defined]
        assert unchanged


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
