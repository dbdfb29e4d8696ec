"""Experts over ``ep`` with every other parallelism: outputs and all gradients equal one process's, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fsdp_runtime import FSDPOptions, parallelize, resolve_parallelism
from harness.models import tiny_inputs, tiny_model
from harness.parity import Case, RankReport, assert_parity, compare, mesh_for
from harness.ranks import RankPool, RanksFailed

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
    "parameters kept after forward": (ALL, {"fsdp": FSDPOptions(reshard_after_forward=False)}, {}),
    "prefetching": (TWO, {"fsdp": FSDPOptions(prefetch_forward=1, prefetch_backward=2)}, {}),
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


@pytest.mark.parametrize("half", [0, 1])
def test_dispatched_experts_equal_one_process(four_ranks: RankPool, half: int) -> None:
    names = tuple(CASES)[half::2]
    reports = four_ranks.run(_compare_all, names)
    for name in names:
        try:
            assert_parity([report[name] for report in reports], output=BOUND, gradient=BOUND)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def _compare_gpt_oss() -> list[RankReport]:
    return [compare(Case(OSS, mesh, parallelize, {"plan": plan})) for mesh, plan in ((ALL, "auto"), (TWO, None))]


def test_a_model_with_a_plan_for_experts_alone_equals_one_process(four_ranks: RankPool) -> None:
    for reports in zip(*four_ranks.run(_compare_gpt_oss), strict=True):
        assert_parity(reports)  # gpt-oss computes its rotary tables in float32


def _divided(factor: float | None, mesh: dict[str, int]) -> dict[str, float]:
    """The ratio of each gradient to that of the default."""
    reference = tiny_model(MOE)
    inputs = tiny_inputs(reference, batch=2, length=5)
    gradients = []
    for options in (FSDPOptions(), FSDPOptions(gradient_divide_factor=factor)):
        model = parallelize(copy.deepcopy(reference), mesh_for(mesh), fsdp=options, logits="full")
        model(**inputs, use_cache=False).logits.sum().backward()
        gradients.append({name: each.grad.to_local() for name, each in model.named_parameters()})
    return {
        name: (gradients[1][name].norm() / each.norm()).item() for name, each in gradients[0].items() if each.norm()
    }


def _all_divided() -> list[dict[str, float]]:
    return [_divided(1.0, mesh) for mesh in (TWO, ALL, {"dp_replicate": 2, "dp_shard": 2, "ep": 2})]


def test_a_divide_factor_applies_to_experts_as_to_all_others(four_ranks: RankPool) -> None:
    for found in four_ranks.run(_all_divided):
        for ratios, ranks in zip(found, (2, 2, 4), strict=True):
            assert all(ratio == pytest.approx(ranks) for ratio in ratios.values())


def _adapted(targets: dict[str, Any]) -> None:
    import peft

    model = peft.get_peft_model(tiny_model(MOE), peft.LoraConfig(r=2, **targets))
    resolve_parallelism(model, mesh_for({"dp_shard": 2, "ep": 2}))


def test_adapters_on_stacked_experts_are_refused_and_others_accepted(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"OptionError: .*adapters on stacked experts, which cannot be dispatched"):
        two_ranks.run(_adapted, {"target_parameters": ["mlp.experts.gate_up_proj"]})
    two_ranks.run(_adapted, {"target_modules": ["q_proj"]})


def _refused(mesh: dict[str, int], architecture: str = MOE, **options: Any) -> None:
    resolve_parallelism(tiny_model(architecture), mesh_for(mesh), **options)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        ("CapabilityError: LlamaForCausalLM has no module with stacked experts", {"architecture": "LlamaForCausalLM"}),
        ("CapabilityError: exchange='deepep' needs the kernels of deep_ep", {"expert_exchange": "deepep"}),
    ],
)
def test_what_cannot_be_dispatched_is_refused_before_anything_changes(
    two_ranks: RankPool, error: str, options: dict[str, Any]
) -> None:
    with pytest.raises(RanksFailed, match=error):
        two_ranks.run(_refused, {"dp_shard": 2, "ep": 2}, **options)
