"""The ordered story: check, split over ``tp`` and ``cp``, checkpoint, compile, shard over data-parallel ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.mesh.spec import axis_size, require_axes
from fsdp_runtime.model.structure import anatomy_of
from fsdp_runtime.parallel.activation_checkpoint import (
    ActivationCheckpointing,
    checkpoint_activations,
    modules_to_recompute,
    recomputes,
)
from fsdp_runtime.parallel.async_tp import async_compile_options, prepare_async_tensor_parallel
from fsdp_runtime.parallel.compile import compile_blocks
from fsdp_runtime.parallel.context.apply import (
    apply_context_parallel,
    require_context_parallel,
    under_context_parallelism,
)
from fsdp_runtime.parallel.context.sharding import SequenceOrder, require_order
from fsdp_runtime.parallel.fsdp import (
    ShardingOptions,
    check_sharding,
    data_parallel_mesh,
    shard_over_data_parallel,
)
from fsdp_runtime.parallel.lora import resolve_adapted_plan
from fsdp_runtime.parallel.tensor import Logits, apply_plan, prepared_plan
from tp_plans import Plan, Style

logger = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Plan | Mapping[str, Style | str] | str | None = "auto",
    sequence_parallel: bool = False,
    sequence_order: SequenceOrder = "balanced",
    logits: Logits = "sharded",
    activation_checkpointing: ActivationCheckpointing = "none",
    compile: bool | Mapping[str, Any] = False,  # noqa: A002  # torch's word
    async_tensor_parallel: bool = False,
    mixed_precision: MixedPrecisionPolicy | None = None,
    cpu_offload: bool | None = None,
    reshard_after_forward: bool | None = None,
    sharding: ShardingOptions | None = None,
) -> nn.Module:
    """Make a model run on a mesh, in place; what is not asked for stays as it is.

    Everything is checked before the first module changes, on every rank alike.  What became of the model is told by
    ``parallel_report(model)``.

    Args:
        model: the model, on the meta device (call ``load_weights`` afterwards) or materialised, the same on every
            rank.
        mesh: from ``MeshSpec(...).build()`` or ``adopt_mesh(...)``, or any mesh whose axes bear those names.
        plan: ``"auto"`` (the architecture's plan), a plan, a dict of pattern to style or style word, a dotted
            path to one, or ``None`` to leave every layer whole.  Not used where ``tp`` has size 1.
        sequence_parallel: keep activations between blocks cut on the sequence over ``tp``.
        sequence_order: how the ranks of ``cp`` share a sequence, ``"balanced"`` or ``"contiguous"``; inputs are cut by
            ``sequence_layout(mesh, length, order=...)``.
        logits: ``"sharded"`` on the vocabulary (a DTensor, what ``rl_logprobs`` takes), or ``"full"``: a plain
            tensor, for code such as a Hugging Face loss with ``labels``.
        activation_checkpointing: ``"none"``; ``"mlp"``, ``"block"`` or ``"selective"`` to recompute those parts
            in backward; or a ``Selective`` that names the operators not to run again.
        compile: compile every block in place: ``True``, or keywords of ``torch.compile``.
        async_tensor_parallel: let the compiler overlap the collectives of sequence parallelism with products; needs
            ``compile`` and CUDA.
        mixed_precision: FSDP2's dtypes; ``None`` for none.
        cpu_offload: keep FSDP2's shards on the CPU.
        reshard_after_forward: free a block's gathered parameters after its forward; by default, yes.
        sharding: these three and all else about FSDP2; what is given above wins.

    Returns:
        The same model.

    Raises:
        MeshError: the mesh has axes of other names.
        ModelError: no blocks are found, the model is parallelized already, none of it would recompute as asked, or
            its sequences cannot be split over ``cp``.
        BackendError: an option needs a device that is not there.
        OptionError: an option is not allowed, or needs an axis that the mesh lacks.
        tp_plans.TpPlansError: no plan is known, or it does not fit the model.
    """
    require_axes(mesh)
    require_order(sequence_order)
    _require_fresh(model)
    given: dict[str, Any] = {
        "mixed_precision": mixed_precision,
        "cpu_offload": cpu_offload,
        "reshard_after_forward": reshard_after_forward,
    }
    options = replace(sharding or ShardingOptions(), **{n: v for n, v in given.items() if v is not None})
    data_parallel = _data_parallel(mesh, options)
    anatomy = anatomy_of(model)
    modules_to_recompute(anatomy, activation_checkpointing)
    check_sharding(model, options)
    cp, tp = axis_size(mesh, "cp"), axis_size(mesh, "tp")
    if cp > 1:
        require_context_parallel(model, anatomy)
        options = _summed_over_cp(options, mesh)
    if async_tensor_parallel:
        compile = async_compile_options(mesh, compile, sequence_parallel=sequence_parallel)  # noqa: A001
    chosen = _chosen_plan(model, plan, tp, sequence_parallel=sequence_parallel, logits=logits)

    if chosen is not None:  # the first step that changes the model checks the plan before it does
        apply_plan(model, chosen, mesh["tp"])
    if cp > 1:
        apply_context_parallel(model, mesh["cp"], anatomy, order=sequence_order)
    checkpoint_activations(model, anatomy, activation_checkpointing)
    if async_tensor_parallel:
        prepare_async_tensor_parallel(mesh["tp"])
    if compile is not False:
        compile_blocks(anatomy, {} if compile is True else compile)
    if data_parallel is not None:
        shard_over_data_parallel(model, data_parallel, anatomy, options)
    return model


def _require_fresh(model: nn.Module) -> None:
    """Refuse what is parallelized already, by this package or by another."""
    for path, module in model.named_modules():
        kinds = {cls.__name__ for cls in type(module).__mro__}
        wrapper = next(iter(kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "MegatronFSDP"}), None)
        if isinstance(module, FSDPModule):
            raise ModelError(f"{path or 'the model'} is wrapped by FSDP2 already: parallelize a fresh model")
        if wrapper is not None:
            raise ModelError(f"{path or 'the model'} is wrapped by {wrapper}: parallelize the model inside it, fresh")
        if recomputes(module):
            raise ModelError(f"{path} recomputes its activations already: parallelize a fresh model")
    if under_context_parallelism(model):
        raise ModelError("the model is under context parallelism already: parallelize a fresh model")
    for path, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            axes = " and ".join(parameter.device_mesh.mesh_dim_names or ()) or "a mesh"
            raise ModelError(
                f"{path} is a DTensor over {axes} already: parallelize a fresh model, or call the steps that are left, "
                "such as shard_over_data_parallel, with that mesh"
            )


def _chosen_plan(model: nn.Module, plan: Any, tp: int, *, sequence_parallel: bool, logits: Logits) -> Plan | None:
    """The plan to apply, or ``None`` where layers stay whole."""
    if plan is None:
        if sequence_parallel:
            raise OptionError("sequence_parallel=True needs a plan, and plan=None was given")
        if tp > 1:
            logger.warning("plan=None on a mesh with tp=%d: every rank of tp computes the same", tp)
        return None
    if tp == 1:
        return None
    return prepared_plan(resolve_adapted_plan(plan, model, sequence_parallel=sequence_parallel), logits=logits)


def _summed_over_cp(options: ShardingOptions, mesh: DeviceMesh) -> ShardingOptions:
    """Ranks of ``cp`` have parts of one batch: by default their gradients are summed, and averaged over ``dp`` only."""
    if options.gradient_divide_factor is not None:
        return options
    batches = axis_size(mesh, "dp_replicate") * axis_size(mesh, "dp_shard")
    return replace(options, gradient_divide_factor=float(batches))


def _data_parallel(mesh: DeviceMesh, options: ShardingOptions) -> DeviceMesh | None:
    """The mesh to shard over, or ``None`` where one rank holds everything and nothing needs FSDP."""
    data_parallel = data_parallel_mesh(mesh)
    if data_parallel is not None and (data_parallel.size() > 1 or options.asked):
        return data_parallel
    if options.asked:
        raise OptionError(
            "mixed_precision and cpu_offload are FSDP2's, and the mesh has no dp_shard axis: add one (size 1 will do), "
            "or take adopt_mesh(mesh)"
        )
    return None
