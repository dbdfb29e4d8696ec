"""NeMo's functions call by call: their signatures, and that they do what the originals are for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import fsdp_runtime
from fsdp_runtime import BackendError, MeshSpec, ModelError, OptionError, describe_parallelism, nemo
from fsdp_runtime._torch_compat import offloads_to_cpu
from harness.models import tiny_inputs, tiny_model
from harness.pairwise import alternating_first
from harness.parity import Case, assert_parity, compare
from harness.ranks import RankPool, RanksFailed

#: Argument names in order, as NeMo RL's and Automodel's documentation have them.
SIGNATURES = {
    "fsdp2_strategy_parallelize": "model device_mesh mp_policy offload_policy sequence_parallel "
    "activation_checkpointing tp_shard_plan dp_replicate_mesh_name dp_shard_cp_mesh_name tp_mesh_name",
    "nvfsdp_strategy_parallelize": "model device_mesh optimizer nvfsdp_unit_modules tp_shard_plan "
    "data_parallel_sharding_strategy init_nvfsdp_with_meta_device grad_reduce_in_fp32 preserve_fp32_weights "
    "overlap_grad_reduce overlap_param_gather check_for_nan_in_grad average_in_collective disable_bucketing "
    "calculate_per_token_loss keep_fp8_transpose_cache_when_using_custom_fsdp nccl_ub fsdp_double_buffer dp_mesh_name "
    "cp_mesh_name tp_mesh_name",
    "_parallelize_model": "model dp_mesh tp_mesh param_dtype sequence_parallel activation_checkpointing cpu_offload "
    "custom_parallel_plan",
    "apply_fsdp2_sharding_recursively": "module mesh mp_policy offload_policy",
    "get_hf_tp_shard_plan": "model",
    "import_class_from_path": "name",
    "import_classes_from_paths": "class_paths",
    "translate_to_torch_parallel_style": "style",
    "validate_tp_mesh": "model tp_mesh",
    "get_lm_ac_layers": "model",
    "_get_parallel_plan": "model sequence_parallel tp_shard_plan",
    "unshard_fsdp2_model": "model",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_named_and_ordered_as_in_nemo(name: str) -> None:
    assert list(inspect.signature(getattr(nemo, name)).parameters) == SIGNATURES[name].split()


def automodel(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    return nemo.fsdp2_strategy_parallelize(model, mesh, MixedPrecisionPolicy(), **options)


def nemo_rl(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    return nemo._parallelize_model(model, mesh["dp_shard"], mesh["tp"], torch.float64, **options)


@pytest.mark.parametrize(
    ("mesh", "options"),
    alternating_first(
        [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}],
        [{}, {"sequence_parallel": True, "activation_checkpointing": True}],
    ),
    ids=str,
)
def test_automodels_strategy_computes_what_one_process_does(
    four_ranks: RankPool, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    assert_parity(four_ranks.run(compare, Case("Qwen3ForCausalLM", mesh, automodel, options)))


def test_nemo_rls_function_computes_what_one_process_does(four_ranks: RankPool) -> None:
    options = {"sequence_parallel": True, "activation_checkpointing": True}
    case = Case("Gemma3ForCausalLM", {"dp_shard": 2, "tp": 2}, nemo_rl, options, {"tied": True})
    assert_parity(four_ranks.run(compare, case))  # outputs pass through float32, within the usual bounds


def torch_styles() -> dict[str, ParallelStyle]:
    """A plan as NeMo's users write it."""
    return {
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }


def _custom(plan: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "model"))
    model = nemo.fsdp2_strategy_parallelize(
        tiny_model("LlamaForCausalLM"),
        mesh,
        MixedPrecisionPolicy(param_dtype=torch.float32),
        CPUOffloadPolicy(),
        tp_shard_plan=plan,
        dp_shard_cp_mesh_name="shards",
        tp_mesh_name="model",
    )
    report = describe_parallelism(model)
    return {
        "up": report.sharded["model.layers.0.mlp.up_proj.weight"],
        "q": report.sharded["model.layers.0.self_attn.q_proj.weight"],
        "units": report.fsdp_modules,
        "offloads": offloads_to_cpu(model),
    }


@pytest.mark.parametrize(
    "plan", [torch_styles(), f"{__name__}.torch_styles", {"model.layers.*.mlp.up_proj": "colwise_gather_output"}]
)
def test_custom_plans_of_every_kind_and_axes_of_other_names(four_ranks: RankPool, plan: Any) -> None:
    assert four_ranks.run(_custom, plan)[0] == {
        "up": ("shards", "model"),
        "q": ("shards",),
        "units": ("", "model.layers.0", "model.layers.1"),
        "offloads": True,
    }


def _offload_policy_class() -> bool:
    """NeMo RL passes the class itself for no offload."""
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    model = nemo.fsdp2_strategy_parallelize(tiny_model("LlamaForCausalLM"), mesh, offload_policy=OffloadPolicy)
    return offloads_to_cpu(model)


def test_no_offload_is_no_offload(two_ranks: RankPool) -> None:
    assert two_ranks.run(_offload_policy_class)[0] is False


def _recursive() -> tuple[tuple[str, ...], list[bool], bool]:
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]) for _ in range(2)])
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")["dp_shard"]
    nemo.apply_fsdp2_sharding_recursively(model, mesh, None)
    units = {path: module for path, module in model.named_modules() if isinstance(module, FSDPModule)}
    frees = [unit._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is not None for unit in units.values()]
    return tuple(units), frees, isinstance(model, FSDPModule)


def test_lists_are_wrapped_recursively_and_each_last_member_stays_gathered(two_ranks: RankPool) -> None:
    units, frees, root = two_ranks.run(_recursive)[0]
    assert units == ("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1")
    assert frees == [True, False, True, False]
    assert not root


def _unsharded() -> list[bool]:
    mesh = MeshSpec(dp_shard=2).build(device_type="cpu")
    model = nemo.fsdp2_strategy_parallelize(tiny_model("LlamaForCausalLM"), mesh)
    found = []
    with nemo.unshard_fsdp2_model(model), torch.no_grad():
        model(**tiny_inputs(model, batch=1, length=4))
        found.append(any(isinstance(p, DTensor) for p in model.parameters()))
    return [*found, all(isinstance(p, DTensor) for p in model.parameters())]


def test_unsharding_holds_gathered_parameters_and_puts_them_back(two_ranks: RankPool) -> None:
    assert two_ranks.run(_unsharded)[0] == [False, True]


def _validated() -> None:
    tp = MeshSpec(tp=2).build(device_type="cpu")["tp"]
    for key_value in (4, 2, 1):
        nemo.validate_tp_mesh(tiny_model("LlamaForCausalLM", num_key_value_heads=key_value), tp)
    nemo.validate_tp_mesh(tiny_model("Qwen3ForCausalLM", num_attention_heads=9, num_key_value_heads=3), tp)


def test_heads_that_cannot_be_dealt_are_refused_with_the_sizes_that_can(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"model\.layers\.0 has 9 query and 3 key/value heads.*tp=2: use .* 1, 3, 9"):
        two_ranks.run(_validated)


def test_plans_are_styles_of_torch() -> None:
    model = tiny_model("Qwen3ForCausalLM")
    for plan in (nemo.get_hf_tp_shard_plan(model), nemo._get_parallel_plan(model, sequence_parallel=True)):
        assert "model.layers.*.self_attn.q_proj" in plan
        assert all(isinstance(style, ParallelStyle) for style in plan.values())
    assert nemo._get_parallel_plan(model, tp_shard_plan=torch_styles()).keys() == torch_styles().keys()
    assert isinstance(nemo.translate_to_torch_parallel_style("rowwise"), ParallelStyle)


def test_layers_of_the_language_model_are_those_to_checkpoint() -> None:
    model = tiny_model("Gemma3ForConditionalGeneration")
    assert nemo.get_lm_ac_layers(model) == list(model.model.language_model.layers)


def test_classes_are_imported_from_paths_and_a_wrong_one_is_named() -> None:
    assert nemo.import_classes_from_paths(["torch.optim.AdamW", "torch.nn.Linear"]) == [torch.optim.AdamW, nn.Linear]
    with pytest.raises(OptionError, match=r"'torch\.optim\.Adamw' cannot be imported: module 'torch\.optim' has no"):
        nemo.import_class_from_path("torch.optim.Adamw")
    with pytest.raises(OptionError, match="'AdamW' cannot be imported"):
        nemo.import_class_from_path("AdamW")


def test_a_missing_class_among_several_is_named() -> None:
    with pytest.raises(OptionError, match=r"'torch\.optim\.Adamw' cannot be imported"):
        nemo.import_classes_from_paths(["torch.nn.Linear", "torch.optim.Adamw"])


class _TensorMesh:
    """The only method of a mesh that these functions call."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size


def test_one_rank_and_models_without_blocks_have_nothing_to_validate() -> None:
    nemo.validate_tp_mesh(nn.Linear(2, 2), _TensorMesh(2))
    nemo.validate_tp_mesh(tiny_model("LlamaForCausalLM"), _TensorMesh(1))
    assert nemo.get_lm_ac_layers(nn.Linear(2, 2)) == []


def _raises() -> None:
    raise RuntimeError("boom")


def test_a_plan_path_that_cannot_be_used_is_a_value_error() -> None:
    model = tiny_model("LlamaForCausalLM")
    for path in (f"{__name__}._raises", "torch.nn.Linear", "no.such.module", "NoSuchPlan", "torch.pi"):
        with pytest.raises(ValueError, match=r"boom|Linear|no|type"):
            nemo._get_parallel_plan(model, tp_shard_plan=path)


def test_named_plans_are_found_by_the_adapters() -> None:
    model = tiny_model("LlamaForCausalLM")
    for name in ("auto", "LlamaForCausalLM", "llama_nemotron_super_tp_plan"):
        assert "model.layers.*.self_attn.q_proj" in nemo._get_parallel_plan(model, tp_shard_plan=name)


def test_an_edited_dict_that_does_not_fit_together_is_refused() -> None:
    model = tiny_model("LlamaForCausalLM")
    plan = nemo.get_hf_tp_shard_plan(model)
    assert "model.layers.*.self_attn.k_proj" not in plan  # part of the style of self_attn
    plan["model.layers.*.self_attn.k_proj"] = ColwiseParallel()
    with pytest.raises(
        OptionError, match=r"self_attn\.k_proj has torch's ColwiseParallel, but .*\.self_attn has a style"
    ):
        nemo._get_parallel_plan(model, tp_shard_plan=plan)


@pytest.mark.parametrize(("heads", "key_value", "tp"), [(6, 3, 2), (4, 2, 4)])
def test_head_counts_are_checked_for_a_dict_of_torchs_styles(heads: int, key_value: int, tp: int) -> None:
    model = tiny_model("Qwen3ForCausalLM", num_attention_heads=heads, num_key_value_heads=key_value)
    plan = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    with pytest.raises(ModelError, match=rf"{heads} query and {key_value} key/value heads.*tp={tp}"):
        nemo._resolve_plan(model, False, plan, _TensorMesh(tp))


def test_automodels_strategy_computes_in_bfloat16_unless_a_policy_is_given() -> None:
    model = tiny_model("LlamaForCausalLM", dtype=torch.float32)
    nemo.fsdp2_strategy_parallelize(model, MeshSpec().build(device_type="cpu"))
    with fsdp_runtime.unsharded(model):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(**tiny_inputs(model, batch=1, length=4)).logits.dtype == torch.float32


def test_a_model_without_blocks_is_refused_by_the_strategy() -> None:
    with pytest.raises(ModelError, match="keep the repeated layers"):
        nemo.fsdp2_strategy_parallelize(nn.Linear(2, 2), MeshSpec().build(device_type="cpu"))


class _Block(nn.Module):
    """A block whose feed-forward layers are its own children, as OPT's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.fc1(x).relu())


class _WithoutMLPs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(), _Block()])


WITHOUT_MLPS_PLAN = {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}


def _dtensors_after(error: type[Exception], strategy: Any, model: nn.Module, *arguments: Any, **options: Any) -> int:
    """The number of DTensor parameters after a strategy has raised ``error``."""
    with pytest.raises(error):
        strategy(model, *arguments, **options)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    return sum(isinstance(parameter, DTensor) for parameter in model.parameters())


def _refused_by(adapter: str) -> int:
    mesh = MeshSpec(dp_shard=2, tp=2).build(device_type="cpu")
    match adapter:
        case "fsdp2_strategy_parallelize":
            options: dict[str, Any] = {"tp_shard_plan": WITHOUT_MLPS_PLAN, "activation_checkpointing": True}
            return _dtensors_after(ModelError, nemo.fsdp2_strategy_parallelize, _WithoutMLPs(), mesh, **options)
        case "_parallelize_model":
            options = {"custom_parallel_plan": WITHOUT_MLPS_PLAN, "activation_checkpointing": True}
            arguments = (mesh["dp_shard"], mesh["tp"], torch.float32)
            return _dtensors_after(ModelError, nemo._parallelize_model, _WithoutMLPs(), *arguments, **options)
        case _:
            model = tiny_model("LlamaForCausalLM")
            return _dtensors_after(BackendError, nemo.nvfsdp_strategy_parallelize, model, mesh)


@pytest.mark.parametrize("adapter", ["fsdp2_strategy_parallelize", "_parallelize_model", "nvfsdp_strategy_parallelize"])
def test_a_refusal_by_an_adapter_leaves_every_parameter_a_plain_tensor(four_ranks: RankPool, adapter: str) -> None:
    assert four_ranks.run(_refused_by, adapter) == [0, 0, 0, 0]
