"""Gradients that are still a sum to be taken: sequence-parallel norms leave them so on replicated weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

from rl_logprobs.errors import PlacementError
from rl_logprobs.local_gradients import LocalGradients
from rl_logprobs.reduction import Layout
from rl_logprobs.rows import statistics_dtype


def complete_gradients(gradients: LocalGradients) -> LocalGradients:
    """The same gradients with partial sums completed.

    The partial sums over the same mesh axes travel together, in one all-reduce an axis; the gradients
    themselves are left as they are.

    Raises:
        PlacementError: a partial reduction other than a sum or an average.
    """
    pending: dict[_Kind, list[int]] = {}
    for layout, keys in gradients.alike.items():
        if layout is None or not (axes := _partial_axes(layout, gradients.parts[keys[0]])):
            continue
        for key in keys:
            kind = _Kind(layout.mesh, axes, statistics_dtype(gradients.parts[key].dtype))
            pending.setdefault(kind, []).append(key)
    complete = dict(gradients.parts)
    for kind, keys in pending.items():
        complete.update(zip(keys, _complete([complete[key] for key in keys], kind), strict=True))
    return LocalGradients(complete, gradients.alike)


class _Kind(NamedTuple):
    """What partial sums must share to travel together; ``axes`` are mesh dims with their operation."""

    mesh: DeviceMesh
    axes: tuple[tuple[int, str], ...]
    dtype: torch.dtype


def _partial_axes(layout: Layout, example: torch.Tensor) -> tuple[tuple[int, str], ...]:
    axes = []
    for dim, placement in enumerate(layout.placements):
        if isinstance(placement, Partial) and layout.mesh.size(dim) > 1:
            if placement.reduce_op not in ("sum", "avg"):
                raise PlacementError(
                    f"a gradient of local shape {tuple(example.shape)} is {placement} over mesh dim {dim}; only "
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
