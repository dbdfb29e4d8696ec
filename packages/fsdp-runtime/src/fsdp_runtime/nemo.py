"""The functions of NeMo RL's and NeMo Automodel's parallelizers, with their names and signatures.

They are adapters over ``fsdp_runtime.resolve_parallelism``: change one import line.  Everything is checked before a
model changes, and errors name the fix where the originals assert.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import Optimizer

from fsdp_runtime._torch_compat import flatten_axes, join_axes
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.memory.unshard import unsharded
from fsdp_runtime.mesh.spec import FLATTENED, axis_size, submesh
from fsdp_runtime.model.structure import AttentionHeads, ModelStructure, inspect_model
from fsdp_runtime.parallelism import resolve_steps
from fsdp_runtime.setup import Meshes, Setup
from fsdp_runtime.steps.checkpointing import ActivationCheckpointing
from fsdp_runtime.steps.fsdp.megatron_fsdp import resolve_megatron_fsdp
from fsdp_runtime.steps.fsdp.step import FSDP2
from fsdp_runtime.steps.tensor.step import TensorParallel
from tp_plans import Plan, plan_for

TorchPlan = dict[str, ParallelStyle]


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    tp_shard_plan: Mapping[str, Any] | str | None = None,
    dp_replicate_mesh_name: str = "dp_replicate",
    dp_shard_cp_mesh_name: str = "dp_shard_cp",
    tp_mesh_name: str = "tp",
) -> nn.Module:
    """Apply tensor parallelism, activation checkpointing and FSDP2, in place (Automodel).

    Without ``mp_policy`` the model computes in bfloat16, and gradients and outputs are in float32.  Checkpointing
    recomputes the feed-forward part of every block.  ``tp_shard_plan`` has styles of torch or of ``tp_plans`` by module
    path, or is a dotted path to such a dict or to a function that returns one.

    Raises:
        ModelError: the model has no blocks, or no feed-forward part to recompute, or is already parallelized.
        OptionError: a setting contradicts another or the model's dtypes.
        MeshError: the mesh lacks an axis.
        tp_plans.TpPlansError: no plan is known, or it does not fit.
    """
    if mp_policy is None:
        mp_policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    shards, replicas = _axis(device_mesh, dp_shard_cp_mesh_name), dp_replicate_mesh_name
    fsdp_mesh = join_axes(device_mesh[replicas], shards) if axis_size(device_mesh, replicas) > 1 else shards
    offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None  # NeMo RL passes a class too
    fsdp = FSDP2(mp_policy=mp_policy, offload_policy=offload)
    plan = _SeedPlan(tp_shard_plan, sequence_parallel)
    meshes = Meshes(tp=_tp_mesh(device_mesh, tp_mesh_name), fsdp=fsdp_mesh)
    return _applied(model, meshes, plan, fsdp, recompute=activation_checkpointing)


def _parallelize_model(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    custom_parallel_plan: Mapping[str, Any] | str | None = None,
) -> nn.Module:
    """Apply tensor parallelism, activation checkpointing and FSDP2 with mixed precision, in place (NeMo RL).

    Gradients are reduced and outputs returned in float32.  ``custom_parallel_plan`` is as ``tp_shard_plan`` of
    :func:`fsdp2_strategy_parallelize`.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    offload = CPUOffloadPolicy() if cpu_offload else None
    fsdp = FSDP2(mp_policy=policy, offload_policy=offload)
    plan = _SeedPlan(custom_parallel_plan, sequence_parallel)
    meshes = Meshes(tp=tp_mesh if tp_mesh.size() > 1 else None, fsdp=dp_mesh)
    return _applied(model, meshes, plan, fsdp, recompute=activation_checkpointing)


def _applied(model: nn.Module, meshes: Meshes, plan: TensorParallel, fsdp: FSDP2, *, recompute: bool) -> nn.Module:
    steps = (plan, ActivationCheckpointing("mlp" if recompute else "none"), fsdp)
    resolve_steps(model, meshes, steps, allow_dtensors=True).apply(model)
    return model


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    nvfsdp_unit_modules: list[str] | None = None,
    tp_shard_plan: Mapping[str, Any] | str | None = None,
    data_parallel_sharding_strategy: str = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    dp_mesh_name: str = "dp",
    cp_mesh_name: str = "cp",
    tp_mesh_name: str = "tp",
) -> tuple[nn.Module, Optimizer | None]:
    """Apply tensor parallelism and Megatron-FSDP, the successor of nvFSDP (Automodel).

    Arguments keep nvFSDP's names; ``preserve_fp32_weights`` and ``grad_reduce_in_fp32`` became dtypes of a policy, and
    ``check_for_nan_in_grad`` is ``report_nan_in_param_grad``.  Where one rank holds all shards nothing is wrapped.

    Raises:
        BackendError: the extra ``megatron-fsdp`` is not installed, or there is no CUDA device.
        ModelError: no module is of the named classes, or the model is already parallelized.
        OptionError: the installed release does not have a keyword.
    """
    shard_dim, shards = dp_mesh_name, _axis(device_mesh, dp_mesh_name)
    if axis_size(device_mesh, cp_mesh_name) > 1:  # its ranks hold shards too
        shard_dim = "dp_cp"
        shards = flatten_axes(device_mesh, (dp_mesh_name, cp_mesh_name), shard_dim)
    meshes = Meshes(tp=_tp_mesh(device_mesh, tp_mesh_name))
    parallelism = resolve_steps(model, meshes, (_SeedPlan(tp_shard_plan),))
    if shards.size() == 1:
        parallelism.apply(model)
        return model, optimizer
    megatron = resolve_megatron_fsdp(
        model,
        device_mesh,
        parallelism.structure,
        dp_shard_dim=shard_dim,
        tp_dim=tp_mesh_name if tp_mesh_name in (device_mesh.mesh_dim_names or ()) else None,
        unit_modules=nvfsdp_unit_modules,
        main_params_dtype=torch.float32 if preserve_fp32_weights else None,
        main_grads_dtype=torch.float32 if grad_reduce_in_fp32 else None,
        options={
            "zero_dp_strategy": data_parallel_sharding_strategy,
            "init_model_with_meta_device": init_nvfsdp_with_meta_device,
            "overlap_grad_reduce": overlap_grad_reduce,
            "overlap_param_gather": overlap_param_gather,
            "report_nan_in_param_grad": check_for_nan_in_grad,
            "average_in_collective": average_in_collective,
            "disable_bucketing": disable_bucketing,
            "calculate_per_token_loss": calculate_per_token_loss,
            "keep_fp8_transpose_cache": keep_fp8_transpose_cache_when_using_custom_fsdp,
            "nccl_ub": nccl_ub,
            "fsdp_double_buffer": fsdp_double_buffer,
        },
    )
    parallelism.apply(model)
    return megatron.apply(model, optimizer)


def apply_fsdp2_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """Wrap the members of every module list below a module with FSDP2; the last of each list stays gathered.

    Nested lists are traversed; the module itself is not wrapped.
    """
    if not isinstance(module, nn.ModuleList):
        for child in module.children():
            apply_fsdp2_sharding_recursively(child, mesh, mp_policy, offload_policy)
        return
    for index, child in enumerate(module):
        if isinstance(child, nn.ModuleList):
            apply_fsdp2_sharding_recursively(child, mesh, mp_policy, offload_policy)
        else:
            fully_shard(
                child,
                mesh=mesh,
                mp_policy=mp_policy or MixedPrecisionPolicy(),
                offload_policy=offload_policy or OffloadPolicy(),
                reshard_after_forward=index < len(module) - 1,
            )


def get_hf_tp_shard_plan(model: nn.Module) -> TorchPlan:
    """Return the plan that transformers ships for a model, as styles of torch.

    Raises:
        tp_plans.PlanError: it ships none.
    """
    return dict(plan_for(model, "transformers").to_torch())


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Return torch's style for a style name of transformers' plans.

    Raises:
        tp_plans.errors.UnknownStyleError: the name is not known.
    """
    return plan_for(None, {"module": style}).to_torch()["module"]


def import_class_from_path(name: str) -> Any:
    """Import an object by its dotted path, such as ``"torch.optim.AdamW"``.

    Raises:
        OptionError: the module cannot be imported, or has nothing of that name.
    """
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"{name!r} cannot be imported: {error}") from error


def import_classes_from_paths(class_paths: list[str]) -> list[Any]:
    """Import several objects by their dotted paths; see :func:`import_class_from_path`."""
    return [import_class_from_path(path) for path in class_paths]


def validate_tp_mesh(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Check that the attention heads of every block are divisible over a mesh.

    More ranks than key/value heads are allowed: ranks then share a head.  One rank, and a model without blocks, pass.

    Raises:
        ModelError: the heads of a block are not divisible; the message has the sizes of ``tp`` that are allowed.
    """
    if tp_mesh.size() > 1 and (structure := _structure(model)) is not None:
        _check_heads(structure, tp_mesh.size(), may_share=True)


def _structure(model: nn.Module) -> ModelStructure | None:
    try:
        return inspect_model(model)
    except ModelError:
        return None


def _check_heads(structure: ModelStructure, tp: int, *, may_share: bool) -> None:
    """Check that heads divide over ranks; with ``may_share`` ranks may share a key/value head."""

    def divisible(heads: AttentionHeads, size: int) -> bool:
        shares = may_share and not size % heads.key_value
        return not heads.query % size and (shares or not heads.key_value % size)

    for path, heads in structure.heads.items():
        if not divisible(heads, tp):
            legal = ", ".join(str(size) for size in range(1, heads.query + 1) if divisible(heads, size))
            raise ModelError(
                f"{path} has {heads.query} query and {heads.key_value} key/value heads, which cannot be sharded over "
                f"tp={tp}: use a tp out of {legal}"
            )


def get_lm_ac_layers(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the language model, to which activation checkpointing applies; none without blocks."""
    structure = _structure(model)
    return [] if structure is None else [structure.blocks[path] for path in structure.decoder]


def _get_parallel_plan(
    model: nn.Module, sequence_parallel: bool = False, tp_shard_plan: Mapping[str, Any] | str | None = None
) -> TorchPlan:
    """Return the given plan, or the architecture's, as styles of torch.

    Raises:
        tp_plans.TpPlansError: no plan is known, or the one given cannot be used.
    """
    plan = _resolve_plan(model, sequence_parallel, tp_shard_plan)
    return dict(plan.to_torch()) if isinstance(plan, Plan) else plan


def unshard_fsdp2_model(model: nn.Module) -> AbstractContextManager[object]:
    """Keep the parameters of a model gathered inside the ``with``."""
    return unsharded(model)


@dataclass(frozen=True)
class _SeedPlan(TensorParallel):
    """A plan as the seeds take it: ``None`` for the architecture's, or torch's styles as they are."""

    plan: Any = None

    def __post_init__(self) -> None:
        """The seeds' options are checked where the plan is resolved."""

    def resolve(self, setup: Setup) -> Setup:
        return setup if setup.meshes.tp is None else replace(setup, plan=self.plan_for(setup))

    def plan_for(self, setup: Setup) -> Plan | TorchPlan:
        return _resolve_plan(setup.facts.model, self.sequence_parallel, self.plan, setup.meshes.tp)


def _tp_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    return mesh[name] if axis_size(mesh, name) > 1 else None


def _resolve_plan(
    model: nn.Module,
    sequence_parallel: bool,
    plan: Mapping[str, Any] | str | None,
    tp_mesh: DeviceMesh | None = None,
) -> Plan | TorchPlan:
    """Return a plan, or torch's styles as given: only their head counts can be checked."""
    if isinstance(plan, str) and "." in plan:
        path, plan = plan, import_class_from_path(plan)
        if callable(plan) and not isinstance(plan, type):
            try:
                plan = plan()
            except Exception as error:
                raise OptionError(f"plan {path!r}: calling it raised {type(error).__name__}: {error}") from error
    if isinstance(plan, Mapping) and plan and all(isinstance(style, ParallelStyle) for style in plan.values()):
        _check_edited(plan)
        structure = _structure(model)
        if tp_mesh is not None and structure is not None and any("attn" in key or "attention" in key for key in plan):
            _check_heads(structure, tp_mesh.size(), may_share=False)
        return dict(plan)
    return plan_for(model, "auto" if plan is None else plan, sequence_parallel=sequence_parallel, mesh=tp_mesh)


def _check_edited(plan: Mapping[str, ParallelStyle]) -> None:
    """Refuse torch's own style for a layer inside attention that a style of ``tp_plans`` shards."""
    ours = {pattern for pattern, style in plan.items() if type(style).__module__.startswith("tp_plans.")}
    for pattern, style in plan.items():
        parent = pattern.rpartition(".")[0]
        if pattern not in ours and parent in ours:
            raise OptionError(
                f"{pattern} has torch's {type(style).__name__}, but {parent} has a style of tp_plans that shards "
                "all of its heads: give torch's styles for every layer, or edit the plan before to_torch(), as "
                "in {**tp_plans.plan_for(model, 'transformers'), ...}"
            )


def _axis(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return one axis, also one that was flattened under another name."""
    return submesh(mesh, name) if name in (*(mesh.mesh_dim_names or ()), *FLATTENED) else mesh[name]
