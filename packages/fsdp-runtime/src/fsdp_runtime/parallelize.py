"""The ordered story: check, split over ``tp`` and ``cp``, checkpoint, compile, shard over data-parallel ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.mesh.spec import axis_size, require_axes
from fsdp_runtime.model.structure import inspect_model
from fsdp_runtime.parallel.activation_checkpoint import (
    ActivationCheckpointing,
    apply_ac,
    modules_to_recompute,
    recomputes,
)
from fsdp_runtime.parallel.async_tp import async_compile_options, prepare_async_tensor_parallel
from fsdp_runtime.parallel.compile import apply_compile
from fsdp_runtime.parallel.context.apply import (
    apply_cp,
    require_context_parallel,
    under_context_parallelism,
)
from fsdp_runtime.parallel.context.sharding import LoadBalancer, require_load_balancer
from fsdp_runtime.parallel.fsdp import (
    FSDPOptions,
    apply_fsdp,
    check_sharding,
    fsdp_mesh,
)
from fsdp_runtime.parallel.lora import resolve_adapted_plan
from fsdp_runtime.parallel.tensor import Logits, apply_tp, prepared_plan
from tp_plans import Plan, Style

logger = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Plan | Mapping[str, Style | str] | str | None = "auto",
    sequence_parallel: bool = False,
    cp_load_balancer: LoadBalancer = "headtail",
    logits: Logits = "sharded",
    activation_checkpointing: ActivationCheckpointing = "none",
    compile: bool | Mapping[str, Any] = False,  # noqa: A002  # torch's word
    async_tensor_parallel: bool = False,
    fsdp: FSDPOptions | None = None,
) -> nn.Module:
    """Make a model run on a mesh, in place; what is not asked for stays as it is.

    Everything is checked before the first module changes, on every rank alike.  What became of the model is told by
    ``describe_parallelism(model)``.

    Args:
        model: the model, on the meta device (call ``load_weights`` afterwards) or materialised, the same on every
            rank.
        mesh: from ``MeshSpec(...).build()`` or ``adopt_mesh(...)``, or any mesh whose axes bear those names.
        plan: ``"auto"`` (the architecture's plan), a plan, a dict of pattern to style or style word, a dotted
            path to one, or ``None`` to leave every layer whole.  Not used where ``tp`` has size 1.
        sequence_parallel: keep activations between blocks cut on the sequence over ``tp``.
        cp_load_balancer: the tokens that each rank of ``cp`` holds: ``"headtail"`` (one chunk from either end) or
            ``None`` (one contiguous chunk); shard inputs with ``sequence_layout(mesh, length, load_balancer=...)``.
        logits: ``"sharded"`` on the vocabulary (a DTensor, what ``rl_logprobs`` takes), or ``"full"``: a plain
            tensor, for code such as a Hugging Face loss with ``labels``.
        activation_checkpointing: ``"none"``; ``"mlp"``, ``"block"`` or ``"selective"`` to recompute those parts
            in backward; or a ``SelectiveCheckpoint`` that names the operators not to run again.
        compile: compile every block in place: ``True``, or keywords of ``torch.compile``.
        async_tensor_parallel: let the compiler overlap the collectives of sequence parallelism with products; needs
            ``compile`` and CUDA.
        fsdp: FSDP2's settings: dtypes, CPU offload, resharding, prefetching, frozen parameters.

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
    require_load_balancer(cp_load_balancer)
    _require_fresh(model)
    options = fsdp or FSDPOptions()
    data_parallel = _data_parallel(mesh, options)
    structure = inspect_model(model)
    modules_to_recompute(structure, activation_checkpointing)
    check_sharding(model, options)
    cp, tp = axis_size(mesh, "cp"), axis_size(mesh, "tp")
    if cp > 1:
        require_context_parallel(model, structure)
        options = _summed_over_cp(options, mesh)
    if async_tensor_parallel:
        compile = async_compile_options(mesh, compile, sequence_parallel=sequence_parallel)  # noqa: A001
    chosen = _chosen_plan(model, plan, tp, sequence_parallel=sequence_parallel, logits=logits)

    if chosen is not None:  # the first step that changes the model checks the plan before it does
        apply_tp(model, chosen, mesh["tp"])
    if cp > 1:
        apply_cp(model, mesh["cp"], structure, load_balancer=cp_load_balancer)
    apply_ac(model, structure, activation_checkpointing)
    if async_tensor_parallel:
        prepare_async_tensor_parallel(mesh["tp"])
    if compile is not False:
        apply_compile(structure, {} if compile is True else compile)
    if data_parallel is not None:
        apply_fsdp(model, data_parallel, structure, options)
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
                "such as apply_fsdp, with that mesh"
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


def _summed_over_cp(options: FSDPOptions, mesh: DeviceMesh) -> FSDPOptions:
    """Ranks of ``cp`` have parts of one batch: by default their gradients are summed, and averaged over ``dp`` only."""
    if options.gradient_divide_factor is not None:
        return options
    batches = axis_size(mesh, "dp_replicate") * axis_size(mesh, "dp_shard")
    return replace(options, gradient_divide_factor=float(batches))


def _data_parallel(mesh: DeviceMesh, options: FSDPOptions) -> DeviceMesh | None:
    """The mesh to shard over, or ``None`` where one rank holds everything and nothing needs FSDP."""
    data_parallel = fsdp_mesh(mesh)
    if data_parallel is not None and (data_parallel.size() > 1 or options.requires_fsdp):
        return data_parallel
    if options.requires_fsdp:
        raise OptionError(
            "mp_policy and offload_policy need FSDP2, and the mesh has no dp_shard axis: add one (size 1 is enough), "
            "or pass adopt_mesh(mesh)"
        )
    return None
