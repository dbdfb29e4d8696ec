"""Experts over ``ep`` with every other parallelism: outputs and all gradients equal one process's, in float64."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_runtime import FSDP2, parallelize, resolve_parallelism, submesh
from fsdp_runtime.monitor import monitor_ranks
from fsdp_runtime.steps import ExpertParallel
from harness.collectives import RecordCollectives
from harness.models import tiny_inputs, tiny_model
from harness.parity import Case, RankReport, assert_parity, compare, gradient_errors, logits_of, mesh_for
from harness.ranks import RankPool, RanksFailed
from tp_plans.torch_styles import AllToAllExchange, DispatchedTokens

MOE, OSS = "Qwen3MoeForCausalLM", "GptOssForCausalLM"
#: No bound of a lower precision: this model computes in float64 throughout.
BOUND = 1e-12

TWO = {"dp_shard": 2, "tp": 2, "ep": 2}
ALL = {"dp_shard": 2, "tp": 2, "ep": 4}
SP = {"sequence_parallel": True}

#: Name to mesh, options of ``parallelize``, and options of the model.
CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "ep is tp": (TWO, {}, {}),
    "ep is the world": (ALL, {}, {}),
    "ep is the world, without tp": ({"dp_shard": 4, "ep": 4}, {}, {}),
    "ep is smaller than dp_shard": ({"dp_shard": 4, "ep": 2}, {}, {}),
    "ep is smaller than tp, without data parallelism": ({"tp": 4, "ep": 2}, {}, {}),
    "replicas of both": ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {}, {}),
    "replicas of one tp group": ({"dp_replicate": 2, "tp": 2, "ep": 2}, {}, {}),
    "sequence parallelism": (TWO, SP, {}),
    "sequence parallelism, ep is the world": (ALL, SP, {}),
    "layers replicated over tp": (ALL, {"plan": None}, {}),
    "block checkpointing": (ALL, {"activation_checkpointing": "block"}, {}),
    "mlp checkpointing": (TWO, {"activation_checkpointing": "mlp", **SP}, {}),
    "selective checkpointing": (TWO, {"activation_checkpointing": "selective"}, {}),
    "parameters kept after forward": (ALL, {"fsdp": FSDP2(reshard_after_forward=False)}, {}),
    "prefetching": (TWO, {"fsdp": FSDP2(prefetch_forward=1, prefetch_backward=2)}, {}),
    "full logits": (ALL, {"logits": "full"}, {}),
    "every expert is chosen": (ALL, {}, {"num_experts_per_tok": 8}),
    "batched products": (ALL, {}, {"experts": "batched_mm"}),
}


def _compare_all(names: tuple[str, ...]) -> dict[str, RankReport]:
    return {
        name: compare(Case(MOE, mesh, parallelize, options, model))
        for name, (mesh, options, model) in CASES.items()
        if name in names
    }


#: Those of the default tests: ``ep`` smaller and larger than ``tp``, replicas, sequence parallelism, recomputation.
DEFAULT = (
    "ep is smaller than tp, without data parallelism",
    "replicas of both",
    "sequence parallelism, ep is the world",
    "mlp checkpointing",
)


@pytest.mark.parametrize(
    "names",
    [DEFAULT, pytest.param(tuple(name for name in CASES if name not in DEFAULT), marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_dispatched_experts_equal_one_process(four_ranks: RankPool, names: tuple[str, ...]) -> None:
    reports = four_ranks.run(_compare_all, names)
    for name in names:
        try:
            assert_parity([report[name] for report in reports], output=BOUND, gradient=BOUND)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def _compare_gpt_oss() -> list[RankReport]:
    """The experts' own forward, and a function in its place whose arguments have other names."""
    cases = ((ALL, {}, "eager"), (TWO, {"plan": None}, "eager"), (TWO, SP, "batched_mm"), (ALL, {}, "batched_mm"))
    model = {"num_hidden_layers": 1}
    return [compare(Case(OSS, mesh, parallelize, options, {**model, "experts": how})) for mesh, options, how in cases]


def test_a_model_with_a_plan_for_experts_alone_equals_one_process(four_ranks: RankPool) -> None:
    for reports in zip(*four_ranks.run(_compare_gpt_oss), strict=True):
        assert_parity(reports)  # gpt-oss computes its rotary tables in float32


def _divided(factor: float | None, mesh: dict[str, int]) -> dict[str, float]:
    """The ratio of each gradient to that of the default."""
    reference = tiny_model(MOE, num_hidden_layers=1)
    inputs = tiny_inputs(reference, batch=2, length=5)
    gradients = []
    for options in (FSDP2(), FSDP2(gradient_divide_factor=factor)):
        model = parallelize(copy.deepcopy(reference), mesh_for(mesh), fsdp=options, logits="full")
        model(**inputs, use_cache=False).logits.sum().backward()
        gradients.append({name: each.grad.to_local() for name, each in model.named_parameters()})
    return {
        name: (gradients[1][name].norm() / each.norm()).item() for name, each in gradients[0].items() if each.norm()
    }


def _all_divided() -> list[dict[str, float]]:
    return [_divided(1.0, mesh) for mesh in (ALL, {"dp_replicate": 2, "dp_shard": 2, "ep": 2})]


def test_a_divide_factor_applies_to_experts_as_to_all_others(four_ranks: RankPool) -> None:
    for found in four_ranks.run(_all_divided):
        for ratios, ranks in zip(found, (2, 4), strict=True):
            assert all(ratio == pytest.approx(ranks) for ratio in ratios.values())


def _adapted(mesh: dict[str, int], merged: bool, **options: Any) -> None:
    import peft

    model = peft.get_peft_model(tiny_model(MOE), peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"]))
    if merged:
        model.merge_adapter()
    resolve_parallelism(model, mesh_for(mesh), **options)


def test_adapters_on_experts_that_cannot_be_divided_are_refused(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"OptionError: .*experts carries adapters that are merged"):
        two_ranks.run(_adapted, {"dp_shard": 2, "ep": 2}, True)
    with pytest.raises(RanksFailed, match=r"OptionError: .*experts adapts stacked experts. Over tp this needs a"):
        two_ranks.run(_adapted, {"tp": 2, "ep": 2}, False, plan=None)


def _refused(mesh: dict[str, int], architecture: str = MOE, model: Any = None, **options: Any) -> None:
    resolve_parallelism(tiny_model(architecture, **(model or {})), mesh_for(mesh), **options)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        ("CapabilityError: LlamaForCausalLM has no module with stacked experts", {"architecture": "LlamaForCausalLM"}),
        ("7 experts cannot be divided over ep=2", {"model": {"num_experts": 7}}),
        ("PlanError: exchange='deepep' is unknown", {"steps": (ExpertParallel("deepep"),)}),
    ],
)
def test_what_cannot_be_dispatched_is_refused_before_anything_changes(
    two_ranks: RankPool, error: str, options: dict[str, Any]
) -> None:
    with pytest.raises(RanksFailed, match=error):
        two_ranks.run(_refused, {"dp_shard": 2, "ep": 2}, **options)


def _rounding(dtype: torch.dtype) -> tuple[float, float]:
    """The largest gradient errors, against float64, of ``eager`` in one process and of ``grouped_mm`` over ``ep``."""
    every = {"num_experts_per_tok": 8, "num_hidden_layers": 1}  # no choice that rounding could turn
    eager = tiny_model(MOE, dtype=dtype, **every)
    exact = copy.deepcopy(eager).double()
    inputs = tiny_inputs(eager, batch=4, length=7)
    mesh = mesh_for(ALL)
    data = submesh(mesh, "dp")
    grouped = tiny_model(MOE, dtype=dtype, experts="grouped_mm", **every)
    assert all(torch.equal(one, other) for one, other in zip(grouped.parameters(), eager.parameters(), strict=True))
    grouped = parallelize(grouped, mesh)
    rows = slice(2 * data.get_local_rank(), 2 * data.get_local_rank() + 2)
    for model, own, ranks in (
        (exact, slice(None), 1),
        (eager, slice(None), 1),
        (grouped, rows, data.size()),
    ):
        logits = logits_of(model, {"input_ids": inputs["input_ids"][own]}).double()
        weights = torch.randn(4, *logits.shape[1:], generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
        (logits * weights[own]).sum().mul(ranks).backward()
    expected = {name: each.grad for name, each in exact.named_parameters()}
    largest = [max(gradient_errors(expected, model).values()) for model in (eager, grouped)]
    return largest[0], largest[1]


def _all_rounding() -> list[tuple[float, float]]:
    return [_rounding(dtype) for dtype in (torch.float32, torch.bfloat16)]


def test_grouped_products_over_ranks_round_like_eager_experts_in_one_process(four_ranks: RankPool) -> None:
    for rank in four_ranks.run(_all_rounding):
        for (eager, grouped), epsilon in zip(rank, (2**-23, 2**-8), strict=True):
            # Sums over experts, tp and data-parallel ranks are rounded once more each: twice as far off, at most.
            assert 0 < grouped < 2 * eager
            assert eager < 64 * epsilon  # sums of 64 products


def _calls(layers: int, options: dict[str, Any]) -> Counter[str]:
    """How often this rank communicates over ``ep`` in a forward and in a backward, by kind."""
    model = parallelize(tiny_model(MOE, num_hidden_layers=layers), mesh_for(ALL), **options)
    inputs = tiny_inputs(model, batch=2, length=6)
    found = Counter[str]()
    ranks = tuple(submesh(mesh_for(ALL), "ep").mesh.flatten().tolist())
    with RecordCollectives() as forward:
        logits = logits_of(model, inputs)
    with RecordCollectives() as backward:
        logits.sum().backward()
    for phase, record in (("forward", forward), ("backward", backward)):
        found.update(f"{phase} {call.kind}" for call in record.calls if call.ranks == ranks)
    return found


def _calls_of_a_layer(options_of_cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    found = []
    for options in options_of_cases:
        fewer, more = _calls(1, options), _calls(2, options)
        found.append({name: count - fewer[name] for name, count in more.items() if count != fewer[name]})
    return found


@pytest.mark.parametrize("options", [SP, pytest.param({}, marks=pytest.mark.slow)], ids=["SP", "TP"])
def test_a_layer_exchanges_four_times_forward_and_three_times_backward(
    four_ranks: RankPool, options: dict[str, Any]
) -> None:
    # Forward the counts, the pairs with their weights, rows and sums; backward sums, the weights of pairs, and rows.
    layer = {"forward all_to_all": 4, "backward all_to_all": 3}
    assert four_ranks.run(_calls_of_a_layer, [options]) == [[layer]] * 4


class _Dies(AllToAllExchange):
    """Rank 1 ends before the second layer's exchange."""

    calls = 0

    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor, *, experts: int) -> DispatchedTokens:
        type(self).calls += 1
        if dist.get_rank() == 1 and self.calls == 2:
            return self.end(super().dispatch, hidden, index, weights, experts=experts)
        return super().dispatch(hidden, index, weights, experts=experts)

    def end(self, dispatch: Any, *args: Any, **kwargs: Any) -> DispatchedTokens:
        os._exit(3)


class _DiesBackward(_Dies):
    """Rank 1 ends before the backward of the second layer's exchange."""

    def end(self, dispatch: Any, *args: Any, **kwargs: Any) -> DispatchedTokens:
        dispatched: DispatchedTokens = dispatch(*args, **kwargs)
        dispatched.rows.register_hook(lambda gradient: os._exit(3))
        return dispatched


def _lose_a_rank(exchange: type[_Dies]) -> None:
    model = parallelize(tiny_model(MOE), mesh_for({"dp_shard": 4, "ep": 4}), steps=(ExpertParallel(exchange),))
    with monitor_ranks(timeout=5.0) as monitor:
        with monitor.phase("forward"):
            logits = logits_of(model, tiny_inputs(model, batch=1, length=5))
        with monitor.phase("backward"):
            logits.sum().backward()


@pytest.mark.parametrize(
    ("exchange", "phase"), [pytest.param(_Dies, "forward", marks=pytest.mark.slow), (_DiesBackward, "backward")]
)
def test_exchange_ends_every_rank_with_an_error_that_names_the_dead_one(
    monkeypatch: pytest.MonkeyPatch, exchange: type[_Dies], phase: str
) -> None:
    monkeypatch.setattr("harness.ranks.GRACE_SECONDS", 60.0)
    pool = RankPool(4)
    try:
        begun = time.monotonic()
        with pytest.raises(RanksFailed) as failure:
            pool.run(_lose_a_rank, exchange, timeout=240)
        assert time.monotonic() - begun < 200  # of which most is the start of four processes
    finally:
        pool.close(force=True)
    errors = failure.value.errors
    assert errors.pop(1).type_name == "Died"
    assert {error.type_name for error in errors.values()} == {"LostRankError"}
    assert all(f"rank 1, in phase '{phase}'" in error.message for error in errors.values())
    assert sorted(errors) == [0, 2, 3]
