"""Recomputation keeps the routes of the first forward, whatever its own scores would choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_runtime import parallelize
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from tp_plans.torch_styles import AllToAllExchange, DispatchedTokens

_routes: list[Tensor] = []


class _Watched(AllToAllExchange):
    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor, *, experts: int) -> DispatchedTokens:
        _routes.append(index.clone())
        return super().dispatch(hidden, index, weights, experts=experts)


class _NoiseInRecomputation:
    """Adds noise to the input of a module from its second call on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls += 1
        noise = torch.randn(args[0].shape, dtype=args[0].dtype, generator=torch.Generator().manual_seed(5))
        return (args[0] + (self.calls > 1) * noise, *args[1:])


def _routes_of_a_step(mode: str) -> tuple[list[list[Any]], bool]:
    """The routes of every exchange of a step, and whether all gradients are finite."""
    _routes.clear()
    model = tiny_model("Qwen3MoeForCausalLM")
    for path, module in model.named_modules():
        if path.endswith(".gate"):
            module.register_forward_pre_hook(_NoiseInRecomputation())
    mesh = mesh_for({"dp_shard": 2, "ep": 2})
    model = parallelize(model, mesh, activation_checkpointing=mode, expert_exchange=_Watched)
    model(**tiny_inputs(model, batch=2, length=9), use_cache=False).logits.sum().backward()
    finite = all(bool(each.grad.to_local().isfinite().all()) for each in model.parameters())
    return [index.tolist() for index in _routes], finite


@pytest.mark.parametrize("mode", ["block", "mlp", "selective"])
def test_recomputation_under_noise_sends_tokens_where_the_forward_did(two_ranks: RankPool, mode: str) -> None:
    for routes, finite in two_ranks.run(_routes_of_a_step, mode):
        first, second, *recomputed = routes  # two layers forward; backward recomputes the last first
        assert recomputed == [second, first]
        assert finite


def test_the_noise_changes_routes_that_are_not_pinned() -> None:
    model = tiny_model("Qwen3MoeForCausalLM")
    gate: Any = model.get_submodule("model.layers.0.mlp.gate")
    gate.register_forward_pre_hook(_NoiseInRecomputation())
    hidden = torch.randn(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    first, second = (gate(hidden)[-1].tolist() for _ in range(2))
    assert first != second
