"""The ordered story: what it refuses, that a refusal changes nothing, and what it leaves alone."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_runtime import (
    FSDP2,
    FsdpRuntimeError,
    MeshSpec,
    ModelError,
    nemo,
    parallelize,
    resolve_parallelism,
    setup,
)
from fsdp_runtime._torch_compat import offloads_to_cpu
from fsdp_runtime.setup import ModelFacts, Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps import Compile
from fsdp_runtime.steps.documents.step import PackedRowsWatch
from fsdp_runtime.steps.tensor import step as tensor
from fsdp_runtime.steps.tensor.step import with_logits
from harness.models import tiny_inputs, tiny_model
from harness.parity import Case, assert_parity, compare
from harness.ranks import RankPool, RanksFailed
from tp_plans import ColwiseParallel, Plan, Replicate, Shard, TpPlansError, plan_for


def _state(model: nn.Module) -> list[Any]:
    """What a refusal must not change: classes, hooks, parameter objects and their values."""
    return [
        (name, type(module), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    ] + [(name, id(p), type(p), p.sum().item()) for name, p in model.named_parameters(remove_duplicate=False)]


def _refusal(architecture: str, model_options: dict[str, Any], mesh: dict[str, int], **options: Any) -> str:
    """What ``parallelize`` says when it refuses, once the model is seen to be untouched."""
    model = tiny_model(architecture, **model_options)
    before = _state(model)
    built = MeshSpec(**mesh).build(device_type="cpu")
    try:
        parallelize(model, built, **options)
    except (FsdpRuntimeError, TpPlansError) as error:
        assert _state(model) == before, "a refused model was changed"
        return f"{type(error).__name__}: {error}"
    raise AssertionError("parallelize accepted it")


QWEN3_PLAN = plan_for("Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("model_options", "options", "expected"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            {},
            ["CheckFailedError", "q_proj: 3 heads of 16 (48 features) cannot be split over tp=2", "a tp out of 1, 3"],
        ),
        (
            {},
            {"plan": QWEN3_PLAN.override({"model.layers.*.mlp.up": ColwiseParallel()})},
            ["CheckFailedError", "model.layers.*.mlp.up: the pattern matches no module", "gate_proj, up_proj"],
        ),
        (
            {"tied": True},
            {"plan": QWEN3_PLAN.override({"lm_head": None})},
            ["CheckFailedError", "tied weights laid out differently", "lm_head.weight: not in the plan"],
        ),
        ({}, {"plan": {"lm_head": "diagonal"}}, ["UnknownStyleError", "'diagonal'", "colwise"]),
        ({}, {"plan": "no.such.module.plan"}, ["CustomPlanError", "'no.such.module' cannot be imported"]),
        ({}, {"plan": QWEN3_PLAN, "sequence_parallel": True}, ["CustomPlanError", "not a sequence-parallel one"]),
        ({}, {"plan": None, "sequence_parallel": True}, ["OptionError", "plan=None"]),
        ({}, {"logits": "whole"}, ["OptionError", "'sharded', 'full'"]),
        ({}, {"activation_checkpointing": "all"}, ["OptionError", "'none', 'mlp', 'block'"]),
        (
            {},
            {"compile": Compile({"backend": "no_such"})},
            ["OptionError", "refused by torch.compile", "no_such"],
        ),
        ({}, {"compile": Compile({"colour": True})}, ["OptionError", "refused by torch.compile", "colour"]),
    ],
    ids=[
        "heads",
        "pattern",
        "tie",
        "word",
        "path",
        "no-sp-plan",
        "sp-without-plan",
        "logits",
        "checkpointing",
        "backend",
        "keyword",
    ],
)
def test_a_refusal_names_the_fix_on_every_rank_and_leaves_the_model_untouched(
    two_ranks: RankPool, model_options: dict[str, Any], options: dict[str, Any], expected: list[str]
) -> None:
    for message in two_ranks.run(_refusal, "Qwen3ForCausalLM", model_options, {"tp": 2}, **options):
        for part in expected:
            assert part in message


def _refusal_of_unknown_class() -> str:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
    try:
        parallelize(model, MeshSpec(tp=2).build(device_type="cpu"))
    except (FsdpRuntimeError, TpPlansError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("parallelize accepted it")


def test_an_unknown_architecture_is_refused_with_the_known_ones(two_ranks: RankPool) -> None:
    (message, _) = two_ranks.run(_refusal_of_unknown_class)
    assert message.startswith("UnknownArchitectureError: no plan is known for Module")
    assert "Qwen3ForCausalLM" in message


def _parallelize_twice(mesh: dict[str, int]) -> None:
    built = MeshSpec(**mesh).build(device_type="cpu")
    parallelize(parallelize(tiny_model("LlamaForCausalLM"), built), built)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}, {"cp": 2}], ids=str)
def test_a_second_call_is_refused(two_ranks: RankPool, mesh: dict[str, int]) -> None:
    with pytest.raises(RanksFailed, match=r"ModelError: .*already"):
        two_ranks.run(_parallelize_twice, mesh)


def _again_without_tp() -> None:
    model = parallelize(tiny_model("LlamaForCausalLM"), MeshSpec(tp=2).build(device_type="cpu"))
    parallelize(model, MeshSpec(dp_shard=2).build(device_type="cpu"))


def test_a_second_call_on_another_mesh_is_refused_before_anything_changes(two_ranks: RankPool) -> None:
    with pytest.raises(
        RanksFailed, match=r"ModelError: model\.embed_tokens\.weight is a DTensor over tp already: para"
    ):
        two_ranks.run(_again_without_tp)


def test_a_model_wrapped_elsewhere_is_refused() -> None:
    mesh = MeshSpec().build(device_type="cpu")
    wrapped = nn.parallel.DistributedDataParallel(tiny_model("LlamaForCausalLM"))
    with pytest.raises(ModelError, match="the model is wrapped by DistributedDataParallel already"):
        parallelize(wrapped, mesh)
    recomputing = parallelize(tiny_model("LlamaForCausalLM"), mesh, activation_checkpointing="block")
    with pytest.raises(ModelError, match=r"model\.layers\.0 recomputes its activations already"):
        parallelize(recomputing, mesh, activation_checkpointing="mlp")


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        pytest.param(mode, options, marks=[pytest.mark.slow] if mode == "none" or (mode == "mlp") == sp else [])
        for mode in ("selective", "mlp", "none", "block")
        for sp, options in ((True, {"sequence_parallel": True}), (False, {}))
    ],
    ids=str,
)
def test_every_mode_of_checkpointing_composes_with_the_mesh(
    four_ranks: RankPool, options: dict[str, Any], mode: str
) -> None:
    options = {**options, "activation_checkpointing": mode}
    case = Case("Qwen3ForCausalLM", {"dp_shard": 2, "tp": 2}, parallelize, options)
    assert_parity(four_ranks.run(compare, case))


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"sequence_parallel": True}],  # tp alone: test_compile of tp_plans
    ids=["tp", "sp"],
)
def test_compiled_blocks_compute_the_same_on_the_mesh(four_ranks: RankPool, options: dict[str, Any]) -> None:
    options = {**options, "compile": Compile({"backend": "aot_eager"}), "activation_checkpointing": "block"}
    mesh, model = {"dp_shard": 2, "tp": 2}, {"num_hidden_layers": 1}  # a second block would compile its own input
    assert_parity(four_ranks.run(compare, Case("Qwen3ForCausalLM", mesh, parallelize, options, model)))


def _fsdp_settings() -> tuple[bool, bool]:
    fsdp = FSDP2(offload_policy=CPUOffloadPolicy(), reshard_after_forward=False)
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    model = parallelize(tiny_model("LlamaForCausalLM"), mesh, fsdp=fsdp)
    state = fully_shard.state(model.model.layers[0])
    return state._fsdp_param_group.post_forward_mesh_info is not None, offloads_to_cpu(model)


def test_fsdp_options_reach_fsdp2(two_ranks: RankPool) -> None:
    assert two_ranks.run(_fsdp_settings)[0] == (False, True)


def _foreign_axes() -> None:
    parallelize(tiny_model("LlamaForCausalLM"), init_device_mesh("cpu", (2,), mesh_dim_names=("model",)))


def test_axes_of_other_names_are_refused(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="MeshError: the mesh has axes model; name them out of dp_replicate"):
        two_ranks.run(_foreign_axes)


def _on_a_mesh_with_tp_only() -> dict[str, Any]:
    model = parallelize(tiny_model("LlamaForCausalLM"), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return {
        "wrapped": any(isinstance(module, FSDPModule) for module in model.modules()),
        "dtensors": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "axes": {parameter.device_mesh.mesh_dim_names for parameter in model.parameters()},
    }


def test_without_a_data_parallel_axis_nothing_is_wrapped(two_ranks: RankPool) -> None:
    assert two_ranks.run(_on_a_mesh_with_tp_only)[0] == {"wrapped": False, "dtensors": True, "axes": {("tp",)}}


def _every_parameter_on_the_whole_mesh() -> set[tuple[str, ...]]:
    mesh = MeshSpec(dp_shard=2, tp=2).build(device_type="cpu")
    model = parallelize(tiny_model("Qwen3ForCausalLM"), mesh, sequence_parallel=True)
    return {tuple(parameter.device_mesh.mesh_dim_names) for parameter in model.parameters()}


def test_parameters_share_one_mesh_so_that_fused_optimizers_work(four_ranks: RankPool) -> None:
    assert four_ranks.run(_every_parameter_on_the_whole_mesh)[0] == {("dp_shard", "tp")}


def test_a_single_process_keeps_a_plain_model_and_only_watches_for_packed_rows() -> None:
    model = tiny_model("LlamaForCausalLM")
    before = _state(model)
    assert parallelize(model, MeshSpec().build(device_type="cpu"), sequence_parallel=True) is model
    (hook,) = model._forward_pre_hooks.values()
    assert isinstance(hook, PackedRowsWatch)
    assert _state(model)[1:] == before[1:]


def _mixed_precision() -> dict[str, Any]:
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = parallelize(tiny_model("LlamaForCausalLM", dtype=torch.float32), mesh, fsdp=FSDP2(mp_policy=policy))
    logits = model(**tiny_inputs(model, batch=2, length=5), use_cache=False).logits
    logits.float().sum().backward()
    return {
        "logits": logits.dtype,
        "parameters": {parameter.dtype for parameter in model.parameters()},
        "gradients": {parameter.grad.dtype for parameter in model.parameters()},
    }


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_parameters(two_ranks: RankPool) -> None:
    assert two_ranks.run(_mixed_precision)[0] == {
        "logits": torch.bfloat16,
        "parameters": {torch.float32},
        "gradients": {torch.float32},
    }


def test_plan_overrides_survive_the_choice_of_logits() -> None:
    full = with_logits(QWEN3_PLAN, "full")
    assert isinstance(full, Plan)
    assert {pattern for pattern in full if full[pattern] != QWEN3_PLAN[pattern]} == {"lm_head"}


def test_the_choice_of_logits_leaves_layers_of_blocks_sharded_on_the_sequence() -> None:
    gathered = ColwiseParallel(output_layouts=Shard(1), use_local_output=False)  # as DeciLM's single matrices
    full = with_logits(QWEN3_PLAN.override({"model.layers.*.mlp": gathered}), "full")
    assert full["model.layers.*.mlp"] == gathered


@pytest.mark.parametrize("layout", [Shard(2), Replicate()], ids=repr)
def test_full_logits_are_plain_whatever_the_heads_layout_was(layout: Shard | Replicate) -> None:
    head = ColwiseParallel(output_layouts=layout, use_local_output=False)
    full = with_logits(QWEN3_PLAN.override({"lm_head": head}), "full")
    assert full["lm_head"] == ColwiseParallel(output_layouts=Replicate(), use_local_output=True)


#: Every function that inspects a model, in the modules that call it.
QUESTIONS: dict[ModuleType, tuple[str, ...]] = {
    setup: ("inspect_model", "model_of_rows", "is_transformers_model", "attention_in_force"),
    tensor: ("check",),
}
#: The questions to a model's structure, by the property of ``ModelFacts`` that asks.
OF_STRUCTURE = (
    *("token_mixers", "derived_positions", "cuts_padding_mask", "makes_own_masks", "ignores_position_ids"),
    *("masks_embeddings", "needs_full_row"),
)


def _calls(function: Any) -> dict[str, int]:
    """The number of times that a function asks each question to a model; those never asked are left out."""
    counts: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for module, names in QUESTIONS.items():
            for name in names:
                patch.setattr(module, name, counting(name, getattr(module, name)))
        for name in OF_STRUCTURE:
            counted = cached_property(counting(name, vars(ModelFacts)[name].func))
            counted.__set_name__(ModelFacts, name)
            patch.setattr(ModelFacts, name, counted)
        function()
    return dict(counts)


def _calls_of(name: str) -> dict[str, int]:
    mesh = MeshSpec(dp_shard=2, tp=2).build(device_type="cpu")
    model = tiny_model("Qwen3ForCausalLM")
    match name:
        case "parallelize":
            return _calls(lambda: parallelize(model, mesh, activation_checkpointing="mlp"))
        case "fsdp2_strategy_parallelize":
            return _calls(lambda: nemo.fsdp2_strategy_parallelize(model, mesh, activation_checkpointing=True))
        case "_parallelize_model":
            return _calls(lambda: nemo._parallelize_model(model, mesh["dp_shard"], mesh["tp"], torch.float32))
        case _:  # one rank of dp_shard: nothing for Megatron-FSDP to wrap
            alone = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
            return _calls(lambda: nemo.nvfsdp_strategy_parallelize(model, alone))


@pytest.mark.parametrize(
    "name",
    ["parallelize", "fsdp2_strategy_parallelize", "_parallelize_model", "nvfsdp_strategy_parallelize"],
)
def test_a_call_reads_the_structure_once_and_checks_the_plan_once(four_ranks: RankPool, name: str) -> None:
    found = four_ranks.run(_calls_of, name)[0]
    assert {"inspect_model", "token_mixers", "model_of_rows", "check"} <= set(found)
    assert set(found.values()) == {1}


def _calls_with_everything() -> dict[str, int]:
    mesh = MeshSpec(cp=2, tp=2).build(device_type="cpu")
    model = tiny_model("Qwen3ForCausalLM")
    options: dict[str, Any] = {"packed_sequences": True, "context_parallel": "ulysses"}
    return _calls(lambda: parallelize(model, mesh, activation_checkpointing="block", compile=True, **options))


def test_each_question_to_a_model_is_asked_once(four_ranks: RankPool) -> None:
    expected = {name: 1 for names in (*QUESTIONS.values(), OF_STRUCTURE) for name in names}
    assert four_ranks.run(_calls_with_everything)[0] == expected


class _Marks(Step[tuple[str, ...]]):
    """A step from outside, which knows nothing of the others: it looks at the model that it is given."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def check(self, setup: Setup) -> tuple[str, ...]:
        self.seen.append("checked")
        return setup.structure.decoder

    def apply(self, model: nn.Module, setup: Setup, checked: tuple[str, ...]) -> None:
        wrapped = isinstance(model, FSDPModule)
        self.seen.append(f"applied to {len(checked)} blocks {'after' if wrapped else 'before'} FSDP2")


def test_a_step_from_outside_is_checked_and_applied_in_its_place() -> None:
    mark, mesh = _Marks(), MeshSpec().build(device_type="cpu")
    model = tiny_model("LlamaForCausalLM")
    fsdp = FSDP2(mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    resolved = resolve_parallelism(model, mesh, fsdp=fsdp, activation_checkpointing="block", steps=(mark,))
    assert mark.seen == ["checked"]
    resolved.apply(model)
    assert mark.seen == ["checked", f"applied to {len(resolved.structure.decoder)} blocks before FSDP2"]
    assert "ActivationCheckpointing(mode='block', offload=False)" in str(resolved)


def test_resolving_changes_nothing() -> None:
    model = tiny_model("LlamaForCausalLM")
    before = _state(model)
    options = FSDP2(mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    resolve_parallelism(model, MeshSpec().build(device_type="cpu"), activation_checkpointing="block", fsdp=options)
    assert _state(model) == before
