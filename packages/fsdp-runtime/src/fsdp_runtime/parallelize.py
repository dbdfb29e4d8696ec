"""The ordered story: check, split over ``tp``, checkpoint, shard over data-parallel ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fsdp_runtime.anatomy import anatomy_of
from fsdp_runtime.checkpointing import ActivationCheckpointing, checkpoint_activations, require_mode
from fsdp_runtime.errors import MeshError, ModelError, OptionError
from fsdp_runtime.mesh import axis_size, require_axes
from fsdp_runtime.sharding import ShardingOptions, data_parallel_mesh, shard_over_data_parallel
from fsdp_runtime.tensor_parallel import Logits, apply_plan, prepared_plan
from tp_plans import Plan, Style, resolve_plan

logger = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Plan | Mapping[str, Style | str] | str | None = "auto",
    sequence_parallel: bool = False,
    logits: Logits = "sharded",
    activation_checkpointing: ActivationCheckpointing = "none",
    mixed_precision: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Make a model run on a mesh, in place; what is not asked for stays as it is.

    Everything is checked before the first module changes, on every rank alike.

    Args:
        model: the model, on the meta device (call ``load_weights`` afterwards) or materialised, the same on every
            rank.
        mesh: from ``MeshSpec(...).build()``, or any mesh whose axes bear those names.
        plan: ``"auto"`` (the architecture's plan), a plan, a dict of pattern to style or style word, a dotted
            path to one, or ``None`` to leave every layer whole.  Not used where ``tp`` has size 1.
        sequence_parallel: keep activations between blocks cut on the sequence over ``tp``.
        logits: ``"sharded"`` on the vocabulary (a DTensor, what ``rl_logprobs`` takes), or ``"full"``: a plain
            tensor, for code such as a Hugging Face loss with ``labels``.
        activation_checkpointing: ``"none"``, or ``"block"`` to recompute every block in backward.
        mixed_precision: FSDP2's dtypes; ``None`` for none.
        cpu_offload: keep FSDP2's shards on the CPU.
        reshard_after_forward: free a block's gathered parameters after its forward.

    Returns:
        The same model.

    Raises:
        MeshError: the mesh has axes of other names, or context parallelism, which is not supported yet.
        ModelError: no blocks are found, or the model is parallelized already.
        OptionError: an option is not allowed, or needs an axis that the mesh lacks.
        tp_plans.TpPlansError: no plan is known, or it does not fit the model.
    """
    require_axes(mesh)
    if axis_size(mesh, "cp") > 1:
        raise MeshError(f"cp={axis_size(mesh, 'cp')}: context parallelism is not supported yet; use cp=1")
    require_mode(activation_checkpointing)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ModelError("the model is wrapped by FSDP2 already: parallelize a fresh one")
    options = ShardingOptions(
        mixed_precision=mixed_precision, cpu_offload=cpu_offload, reshard_after_forward=reshard_after_forward
    )
    data_parallel = _data_parallel(mesh, options)
    anatomy = anatomy_of(model)
    tp = axis_size(mesh, "tp")
    chosen = _chosen_plan(model, plan, tp, sequence_parallel=sequence_parallel, logits=logits)

    if chosen is not None:  # the first step that changes the model checks the plan before it does
        apply_plan(model, chosen, mesh["tp"])
    checkpoint_activations(model, anatomy, activation_checkpointing)
    if data_parallel is not None:
        shard_over_data_parallel(model, data_parallel, anatomy, options)
    return model


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
    return prepared_plan(resolve_plan(plan, model, sequence_parallel=sequence_parallel), logits=logits)


def _data_parallel(mesh: DeviceMesh, options: ShardingOptions) -> DeviceMesh | None:
    """The mesh to shard over, or ``None`` where one rank holds everything and nothing needs FSDP."""
    data_parallel = data_parallel_mesh(mesh)
    if data_parallel is not None and (data_parallel.size() > 1 or options.asked):
        return data_parallel
    if options.asked:
        raise OptionError(
            "mixed_precision and cpu_offload are FSDP2's, and the mesh has no dp_shard axis: add one (size 1 will do)"
        )
    return None
