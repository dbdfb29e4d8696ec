"""Gradients that are still a sum to be taken: sequence-parallel norms leave them so on replicated weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from rl_logprobs.errors import PlacementError
from rl_logprobs.reduction import layout
from rl_logprobs.rows import statistics_dtype


def local_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, sharing its memory."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def complete_gradients(parameters: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """This rank's part of every gradient, by the parameter's ``id``, with partial sums completed.

    The partial sums over the same mesh axes travel together, in one all-reduce an axis; the gradients
    themselves are left as they are.

    Raises:
        PlacementError: a partial reduction other than a sum or an average.
    """
    local: dict[int, torch.Tensor] = {}
    pending: dict[_Kind, list[int]] = {}
    known: dict[object, tuple[tuple[int, str], ...]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        local[id(parameter)] = local_gradient(gradient)
        if not isinstance(gradient, DTensor):
            continue
        if (where := layout(gradient)) not in known:
            known[where] = _partial_axes(gradient)
        if axes := known[where]:
            kind = _Kind(gradient.device_mesh, axes, statistics_dtype(gradient.dtype))
            pending.setdefault(kind, []).append(id(parameter))
    for kind, keys in pending.items():
        local.update(zip(keys, _complete([local[key] for key in keys], kind), strict=True))
    return local


class _Kind(NamedTuple):
    """What partial sums must share to travel together; ``axes`` are mesh dims with their operation."""

    mesh: DeviceMesh
    axes: tuple[tuple[int, str], ...]
    dtype: torch.dtype


def _partial_axes(gradient: DTensor) -> tuple[tuple[int, str], ...]:
    axes = []
    for dim, placement in enumerate(gradient.placements):
        if isinstance(placement, Partial) and gradient.device_mesh.size(dim) > 1:
            if placement.reduce_op not in ("sum", "avg"):
                raise PlacementError(
                    f"a gradient of shape {tuple(gradient.shape)} is {placement} over mesh dim {dim}; only "
                    f"sums and averages can be completed, redistribute it first"
                )
            axes.append((dim, placement.reduce_op))
    return tuple(axes)


def _complete(tensors: Sequence[torch.Tensor], kind: _Kind) -> list[torch.Tensor]:
    flat = torch.cat([tensor.to(kind.dtype).flatten() for tensor in tensors]).to(kind.mesh.device_type)
    for dim, operation in kind.axes:
        dist.all_reduce(flat, group=kind.mesh.get_group(dim))
        if operation == "avg":
            flat /= kind.mesh.size(dim)
    return list(torch.split(flat, [tensor.numel() for tensor in tensors]))
