"""FSDP2: every block is a unit that is gathered for its own forward and backward, and the rest is the root."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp_runtime._torch_compat import join_axes
from fsdp_runtime.errors import MeshError, OptionError
from fsdp_runtime.mesh.spec import axis_size, submesh
from fsdp_runtime.model.structure import ModelStructure

logger = logging.getLogger(__name__)

_RESHARDS = "_fsdp_runtime_reshards"

FrozenParams = Literal["layer", "root", "replicate"]


@dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """How parameters are sharded over the data-parallel ranks.

    Args:
        mp_policy: dtypes of gathered parameters, reduced gradients and the model's outputs; ``None`` leaves
            every dtype as it is.
        master_dtype: what trainable parameters are converted to before they are sharded, and so what gradients and
            the optimizer work in: ``torch.float32`` under an ``mp_policy`` that computes in less.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on the CPU between uses,
            in pinned memory where the mesh is on an accelerator; ``None`` leaves them on the device.
        reshard_after_forward: free a block's gathered parameters after its forward.
        reshard_last_block: free those of the last block and of the root too, which backward needs first.
        prefetch_forward: blocks whose gathering starts before the forward of the current one; 0 leaves it to the
            host running ahead of the device.
        prefetch_backward: the same in backward, at least 1, which is torch's default.
        frozen_params: what to do with parameters that need no gradient: ``"layer"`` shards them like all others,
            ``"root"`` makes blocks that are wholly frozen part of the root, gathered once a step, and
            ``"replicate"`` leaves every frozen parameter whole on every rank, without any communication.
        gradient_divide_factor: what summed gradients are divided by, such as 1 for a loss that is divided by its
            tokens already; by default the number of ranks that have different batches.
    """

    mp_policy: MixedPrecisionPolicy | None = None
    master_dtype: torch.dtype | None = None
    offload_policy: OffloadPolicy | None = None
    reshard_after_forward: bool = True
    reshard_last_block: bool = False
    prefetch_forward: int = 0
    prefetch_backward: int = 1
    frozen_params: FrozenParams = "layer"
    gradient_divide_factor: float | None = None

    def __post_init__(self) -> None:
        if self.frozen_params not in get_args(FrozenParams):
            raise OptionError(
                f"frozen_params={self.frozen_params!r}: write one of {', '.join(map(repr, get_args(FrozenParams)))}"
            )
        for name, least in (("prefetch_forward", 0), ("prefetch_backward", 1)):
            if type(depth := getattr(self, name)) is not int or depth < least:
                raise OptionError(f"{name}={depth!r}: give a number of blocks, {least} or more")
        if (factor := self.gradient_divide_factor) is not None and not factor > 0:
            raise OptionError(f"gradient_divide_factor={factor!r}: give a positive number")

    @property
    def requires_fsdp(self) -> bool:
        """Whether anything here needs FSDP even where a single rank holds all shards."""
        return self.mp_policy is not None or isinstance(self.offload_policy, CPUOffloadPolicy)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The part of a mesh that FSDP uses: one axis of shards, or replicas times shards (HSDP); ``None`` without.

    Ranks of ``cp`` hold shards too: each has part of the tokens, and their gradients are summed alike.
    """
    names = mesh.mesh_dim_names or ()
    if "cp" in names and axis_size(mesh, "cp") > 1:
        shards = submesh(mesh, "dp_shard_cp")
    elif "dp_shard" in names:
        shards = mesh["dp_shard"]
    elif "dp_replicate" in names:
        raise MeshError("the mesh has dp_replicate but no dp_shard: add dp_shard, of size 1 for replicas only")
    else:
        return None
    return join_axes(mesh["dp_replicate"], shards) if axis_size(mesh, "dp_replicate") > 1 else shards


def apply_fsdp(
    model: nn.Module, mesh: DeviceMesh, structure: ModelStructure, options: FSDPOptions | None = None
) -> nn.Module:
    """Wrap every block and then the model with ``fully_shard``, in place.

    Blocks that share a parameter with another module belong to the root, since two units cannot hold one parameter;
    so do embedding and head, whose tied weight is thereby gathered once.

    Args:
        model: the model, split over ``tp`` already where it is to be.
        mesh: what :func:`fsdp_mesh` gives.
        structure: the model's parts.
        options: dtypes, offload, resharding, prefetching and what becomes of frozen parameters.

    Raises:
        OptionError: options contradict each other, or frozen parameters are to stay whole in another dtype than the
            one to compute in.
    """
    options = options or FSDPOptions()
    check_sharding(model, options)
    if options.master_dtype is not None:
        _convert_trainable(model, options.master_dtype)
    whole = parameters_left_whole(model, options)
    precision = options.mp_policy or MixedPrecisionPolicy()
    offload = options.offload_policy or OffloadPolicy()
    if isinstance(offload, CPUOffloadPolicy) and mesh.device_type == "cpu":  # nothing to pin memory for
        offload = CPUOffloadPolicy(pin_memory=False)

    axis_shards = mesh.size(mesh.ndim - 1)  # of HSDP's two axes the last one shards
    inner = replace(precision, output_dtype=None)  # what blocks hand each other stays in the dtype to compute in

    def shard(module: nn.Module, *, reshard: bool) -> None:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=precision if module is model else inner,
            offload_policy=offload,
            reshard_after_forward=reshard,
            ignored_params=whole,
            shard_placement_fn=lambda parameter: _dim_to_cut(parameter, axis_shards),
        )
        module.__dict__[_RESHARDS] = reshard

    units = _units(structure, _shared_parameters(model), options.frozen_params)
    for block in units.values():
        keep = block is structure.last_block and not options.reshard_last_block
        shard(block, reshard=False if keep else options.reshard_after_forward)
    shard(model, reshard=options.reshard_after_forward and options.reshard_last_block)
    _prefetch([units[path] for path in structure.decoder if path in units], options)
    if options.gradient_divide_factor is not None:
        divide_gradients(model, mesh, options.gradient_divide_factor)
    logger.info("FSDP2: %d blocks and the root over %d ranks", len(units), mesh.size())
    return model


def divide_gradients(model: nn.Module, mesh: DeviceMesh, factor: float) -> None:
    """Divide the gradients that FSDP2 sums over its ranks by ``factor`` instead of by the number of ranks.

    The mean is scaled once it is reduced.  FSDP2's own ``set_gradient_divide_factor`` needs NCCL, or a sum that it
    divides twice where replicas have no shards (torch 2.10 to 2.15).

    Args:
        model: a model that FSDP2 wraps.
        mesh: the mesh that it is wrapped over.
        factor: the divisor.
    """
    scale = mesh.size() / factor

    def rescale(gradients: torch.Tensor) -> None:
        gradients.mul_(scale)

    for module in model.modules():
        if isinstance(module, FSDPModule) and scale != 1:
            module.set_all_reduce_hook(rescale)


def check_sharding(model: nn.Module, options: FSDPOptions) -> None:
    """Raise :class:`OptionError` where options contradict each other or the model; nothing is changed."""
    policy = options.mp_policy
    if options.master_dtype is not None and (policy is None or policy.param_dtype is None):
        raise OptionError(
            f"master_dtype={options.master_dtype} without a dtype to compute in: give "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    parameters_left_whole(model, options)


def parameters_left_whole(model: nn.Module, options: FSDPOptions) -> set[nn.Parameter]:
    """The parameters that ``frozen_params="replicate"`` leaves alone; nothing is changed.

    Raises:
        OptionError: some are not in the dtype to compute in, which FSDP2 then does not convert them to.
    """
    if options.frozen_params != "replicate":
        return set()
    whole = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    dtype = options.mp_policy.param_dtype if options.mp_policy is not None else None
    unlike = [name for name, parameter in whole.items() if dtype is not None and parameter.dtype != dtype]
    if unlike:
        raise OptionError(
            f"frozen_params='replicate' leaves {len(unlike)} parameters in their dtype, first {unlike[0]} in "
            f"{whole[unlike[0]].dtype}, and mp_policy computes in {dtype}: convert them first"
        )
    return set(whole.values())


def reshards_after_forward(module: FSDPModule, *, is_root: bool) -> bool:
    """Whether a unit frees its gathered parameters after forward; for one wrapped elsewhere, torch's default."""
    recorded = module.__dict__.get(_RESHARDS)
    return not is_root if recorded is None else bool(recorded)


def _dim_to_cut(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Where FSDP2 is to cut what has too few rows for its ranks; ``None`` for rows, its default.

    Of merged experts a rank of ``tp`` may hold one or two: cut by rows they would lie whole on as many ranks, and the
    others would hold nothing.  FSDP2 cuts other dims into equal parts only.
    """
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    taken = [placement.dim for placement in getattr(parameter, "placements", ()) if isinstance(placement, Shard)]
    if own.ndim < 2 or own.shape[0] >= shards:
        return None
    free = (dim for dim in range(1, own.ndim) if dim not in taken and own.shape[dim] % shards == 0)
    return next((Shard(dim) for dim in free), None)


def _units(structure: ModelStructure, shared: set[nn.Parameter], frozen: FrozenParams) -> dict[str, nn.Module]:
    """The blocks that become units of their own."""
    units: dict[str, nn.Module] = {}
    for path, block in structure.blocks.items():
        parameters = list(block.parameters())
        alone = shared.isdisjoint(parameters)
        trains = any(parameter.requires_grad for parameter in parameters)
        if alone and (trains or frozen == "layer"):
            units[path] = block
        elif not alone:
            logger.info("%s shares parameters with another module: left to the root", path)
    return units


def _shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that more than one module holds."""
    owners: dict[nn.Parameter, int] = defaultdict(int)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter] += 1
    return {parameter for parameter, count in owners.items() if count > 1}


def _prefetch(blocks: Sequence[nn.Module], options: FSDPOptions) -> None:
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for index, unit in enumerate(units):
        if options.prefetch_forward:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + options.prefetch_forward])
        if options.prefetch_backward > 1:
            before = units[max(0, index - options.prefetch_backward) : index]
            unit.set_modules_to_backward_prefetch(list(reversed(before)))


def _convert_trainable(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in list(model.parameters()):
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != dtype:
            converted = nn.Parameter(parameter.detach().to(dtype))
            converted.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, converted)  # type: ignore[no-untyped-call]  # ties stay ties
