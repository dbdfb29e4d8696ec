"""Recomputation keeps the routes of the first forward, whatever its own scores would choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_runtime import parallelize, record_routes
from fsdp_runtime.steps import ExpertParallel
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
    model = parallelize(model, mesh, activation_checkpointing=mode, steps=(ExpertParallel(_Watched),))
    model(**tiny_inputs(model, batch=2, length=9), use_cache=False).logits.sum().backward()
    finite = all(bool(each.grad.to_local().isfinite().all()) for each in model.parameters())
    return [index.tolist() for index in _routes], finite


@pytest.mark.parametrize("mode", ["block", pytest.param("mlp", marks=pytest.mark.slow), "selective"])
def test_recomputation_under_noise_sends_tokens_where_the_forward_did(two_ranks: RankPool, mode: str) -> None:
    for routes, finite in two_ranks.run(_routes_of_a_step, mode):
        first, second, *recomputed = routes  # two layers forward; backward recomputes the last first
        assert recomputed == [second, first]
        assert finite


def _sessions() -> list[str]:
    """Recomputations of a router that chooses groups first, while routes are recorded, that chose other experts."""
    wrong = []
    for mode in ("block", "selective"):
        model = _grouped_mixture()
        for path, module in model.named_modules():
            if path.endswith(".gate"):
                module.register_forward_pre_hook(_NoiseInRecomputation())
        mesh = mesh_for({"dp_shard": 2, "ep": 2})
        model = parallelize(model, mesh, activation_checkpointing=mode, steps=(ExpertParallel(_Watched),))
        _routes.clear()
        with record_routes(model):
            loss = model(**tiny_inputs(model, batch=2, length=9), use_cache=False).logits.sum()
        loss.backward()
        first, second, *recomputed = [index.tolist() for index in _routes]
        if recomputed != [second, first]:
            wrong.append(mode)
    return wrong


def _grouped_mixture() -> nn.Module:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=131, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3, n_group=4,
        topk_group=2, first_k_dense_replace=0, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # the default computes in float32 at most
    return model


def test_recomputation_under_noise_keeps_recorded_routes_of_chosen_groups(two_ranks: RankPool) -> None:
    assert two_ranks.run(_sessions) == [[], []]


def test_the_noise_changes_routes_that_are_not_pinned() -> None:
    model = tiny_model("Qwen3MoeForCausalLM")
    gate: Any = model.get_submodule("model.layers.0.mlp.gate")
    gate.register_forward_pre_hook(_NoiseInRecomputation())
    hidden = torch.randn(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    first, second = (gate(hidden)[-1].tolist() for _ in range(2))
    assert first != second
