from __future__ import annotations

from functools import cache
from itertools import combinations
from math import comb

import pytest
import torch
import transformers
from torch import nn

from fsdp_runtime import MeshSpec
from fsdp_runtime.dry_run import Estimate, EstimateError, estimate, sweep
from fsdp_runtime.dry_run.build_model import build_model
from fsdp_runtime.dry_run.compare import candidate_meshes
from fsdp_runtime.dry_run.trace.assumed_values import AssumedRoutes, mean_destinations


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(8, 3, 4), (6, 2, 2), (8, 8, 4), (6, 1, 6), (4, 2, 1)])
def test_the_mean_number_of_destinations_is_that_of_all_choices(experts: int, top_k: int, ranks: int) -> None:
    own = experts // ranks
    chosen = list(combinations(range(experts), top_k))
    counted = sum(len({expert // own for expert in each}) for each in chosen) / comb(experts, top_k)
    assert mean_destinations(experts, top_k, ranks) == pytest.approx(counted, rel=1e-12)


def test_one_crossing_for_each_rank_is_three_quarters_of_one_for_each_expert_or_less() -> None:
    assert mean_destinations(experts=64, top_k=8, ranks=8) / 8 <= 0.75


@pytest.mark.parametrize(
    "routes", [AssumedRoutes(48, 2, 4, 2, 1), AssumedRoutes(7, 3, 8, 4, 2), AssumedRoutes(5, 8, 8, 2, 0)]
)
def test_every_pair_is_sent_and_no_rank_gets_more_rows_than_tokens_or_pairs(routes: AssumedRoutes) -> None:
    for routing in ("balanced", "worst"):
        rows, pairs = routes.sent(routing)
        assert sum(pairs) == routes.tokens * routes.top_k
        assert all(row <= min(routes.tokens, pair) for row, pair in zip(rows, pairs, strict=True))
    assert routes.received("worst") >= routes.received("balanced")
    assert routes.received("worst")[1] == routes.tokens * min(routes.top_k, routes.experts // routes.ranks)


def mixture(layers: int = 2) -> transformers.PreTrainedConfig:
    return transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
    )


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(256, 2**20, 2**22))


def test_a_stack_of_experts_larger_than_the_memory_is_built() -> None:
    assert build_model(Stack, torch.bfloat16).get_parameter("experts").nbytes == 2**51


def of(mesh: dict[str, int], **options: object) -> Estimate:
    return estimate(mixture(), mesh, seq_len=16, dtype="fp32", **options)  # type: ignore[arg-type]


@cache
def over_two() -> Estimate:
    """The estimate of two ranks of ``ep`` that several tests read."""
    return of({"dp_shard": 4, "ep": 2})


def test_experts_are_counted_once_over_efsdp_and_ep() -> None:
    without, divided = (found.memory.resident.parameters for found in (of({"dp_shard": 4, "ep": 1}), over_two()))
    assert divided == without


def test_rows_of_the_dispatch_travel_over_ep_forth_and_back() -> None:
    found = over_two()
    exchanged = [item for item in found.traffic if item.kind == "all_to_all"]
    assert {item.axis for item in exchanged} == {"ep"}
    rows, numbers = AssumedRoutes(16, 2, 8, 2, 0).sent("balanced")
    row, layers = 32 * 4, 2
    [backward] = [item for item in exchanged if item.phase == "backward"]
    weights = sum(numbers) * 4
    assert backward.nbytes == layers * (2 * sum(rows) * row + weights)
    assert backward.bytes_sent == layers * ((rows[1] + rows[0]) * row + numbers[0] * 4)
    assert "any 2 of 8 experts equally often" in found.assumptions[-1].assumption


def test_the_worst_routes_need_more_memory_and_send_back_what_came() -> None:
    balanced, worst = over_two(), of({"dp_shard": 4, "ep": 2}, routing="worst")
    assert worst.memory.peak.total > balanced.memory.peak.total
    assert worst.flops > balanced.flops
    assert worst.settings.routing == "worst"
    [forward] = [item for item in worst.traffic if item.kind == "all_to_all" and item.phase == "forward"]
    assert forward.bytes_sent >= 2 * 1 * 16 * 32 * 4  # two layers, one other rank, 16 rows each
    with pytest.raises(EstimateError, match="write one of balanced, worst"):
        of({"dp_shard": 4, "ep": 4}, routing="even")


def test_experts_that_all_get_every_token_are_estimated() -> None:
    config = transformers.Llama4TextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=16,
        intermediate_size_mlp=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_local_experts=4,
        interleave_moe_layer_step=1,
    )
    found = estimate(config, {"dp_shard": 2, "ep": 2}, seq_len=16, dtype="fp32")
    sent = sum(item.nbytes for item in found.traffic if item.kind == "all_to_all" and item.phase == "forward")
    assert sent == 2 * 4 * 16 * 32 * 4  # there and back, experts, tokens, hidden size, bytes


def test_a_sweep_tries_sizes_of_ep_that_divide_the_ranks() -> None:
    meshes = candidate_meshes(4, max_tp=1, dp_replicate=(1, 2), ep=(1, 2, 4))
    assert [(mesh.dp_replicate, mesh.ep) for mesh in meshes] == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
    found = sweep(mixture(layers=1), 2, max_tp=1, ep=(2,), activation_checkpointing=("none",), workers=0, seq_len=8)
    assert found.best is not None
    assert found.best.label == "dp_shard=2 ep=2"
    assert found.best.mesh == MeshSpec(dp_shard=2, ep=2)
