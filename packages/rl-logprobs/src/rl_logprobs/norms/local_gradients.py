"""This rank's part of every gradient, by placement, with partial sums completed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from rl_logprobs._torch_compat import unreduced_parameters
from rl_logprobs.errors import DtypeError, PlacementError
from rl_logprobs.norms.reduce_groups import MeshPlacements
from rl_logprobs.tensors import statistics_dtype


@dataclass(frozen=True)
class LocalGradients:
    """This rank's parts of the gradients."""

    parts: dict[int, torch.Tensor]  # local tensors, by the ``id`` of their parameters
    # ids of parameters, grouped by their gradients' mesh and placements; None for plain tensors. Reading these
    # from a DTensor takes as long as adding up a small tensor, so each is read once.
    by_placement: dict[MeshPlacements | None, list[int]]


def local_gradients(parameters: Sequence[torch.Tensor]) -> LocalGradients:
    """Return this rank's parts of the gradients that are not None, sharing their memory.  Call it without autograd."""
    if waiting := unreduced_parameters().intersection(map(id, parameters)):
        raise PlacementError(
            f"{len(waiting)} gradients are accumulated on each rank and not reduced yet, so a norm leaves them out: "
            f"run the last backward of a step outside of no_sync, with set_requires_gradient_sync(True)"
        )
    parts: dict[int, torch.Tensor] = {}
    by_placement: dict[MeshPlacements | None, list[int]] = {}
    for index, parameter in enumerate(parameters):
        part, placement = parameter.grad, None
        if part is None:
            continue
        if isinstance(part, DTensor):
            placement = MeshPlacements(part.device_mesh, part.placements)
            part = part.to_local()
        if part.layout is not torch.strided or not part.is_floating_point():
            raise DtypeError(
                f"gradient {index} of shape {tuple(part.shape)} is {part.layout} {part.dtype}; norms need dense "
                f"floating-point gradients"
            )
        if not part.untyped_storage().nbytes() and part.numel():
            raise PlacementError(
                f"the memory of gradient {index} of shape {tuple(part.shape)} was freed, as by offloading it to the "
                f"host: bring it back before its norm is computed"
            )
        parts[id(parameter)] = part
        by_placement.setdefault(placement, []).append(id(parameter))
    return LocalGradients(parts, by_placement)


def complete_partial_sums(gradients: LocalGradients) -> LocalGradients:
    """Return the gradients with partial sums completed, in copies."""
    # Sequence-parallel norms leave partial sums on replicated weights. Partial sums over the same mesh axes are reduced
    # together, in one all-reduce per axis.
    pending: dict[_PendingReduction, list[int]] = {}
    for placement, keys in gradients.by_placement.items():
        if placement is None or not (axes := _partial_axes(placement, gradients.parts[keys[0]])):
            continue
        for key in keys:
            dtype = statistics_dtype(gradients.parts[key].dtype)
            pending.setdefault(_PendingReduction(placement.mesh, axes, dtype), []).append(key)
    complete = dict(gradients.parts)
    for reduction, keys in pending.items():
        complete.update(zip(keys, _reduce_together([complete[key] for key in keys], reduction), strict=True))
    return LocalGradients(complete, gradients.by_placement)


class _PendingReduction(NamedTuple):
    """The properties that partial sums share when they are reduced together; ``axes`` are mesh dims and operations."""

    mesh: DeviceMesh
    axes: tuple[tuple[int, str], ...]
    dtype: torch.dtype


def _partial_axes(placement: MeshPlacements, example: torch.Tensor) -> tuple[tuple[int, str], ...]:
    axes = []
    for dim, dim_placement in enumerate(placement.placements):
        if isinstance(dim_placement, Partial) and placement.mesh.size(dim) > 1:
            if dim_placement.reduce_op not in ("sum", "avg"):
                raise PlacementError(
                    f"a gradient of local shape {tuple(example.shape)} is {dim_placement} over mesh dim {dim}; only "
                    f"sums and averages can be completed, redistribute it first"
                )
            axes.append((dim, dim_placement.reduce_op))
    return tuple(axes)


def _reduce_together(tensors: Sequence[torch.Tensor], reduction: _PendingReduction) -> list[torch.Tensor]:
    """Return the tensors reduced over the axes, flat."""
    flat = torch.cat([tensor.to(reduction.dtype).flatten() for tensor in tensors]).to(reduction.mesh.device_type)
    for dim, operation in reduction.axes:
        dist.all_reduce(flat, group=reduction.mesh.get_group(dim))
        if operation == "avg":
            flat /= reduction.mesh.size(dim)
    return list(torch.split(flat, [tensor.numel() for tensor in tensors]))
