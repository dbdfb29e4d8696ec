"""Collectives on plain tensors along one axis, without a gradient; parts have the sizes of ``torch.chunk``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from tp_plans.errors import CapabilityError
from tp_plans.torch_styles._host_time_compat import all_reduced, gathered, reduce_scattered


class _Axis(NamedTuple):
    """What collectives ask of a mesh of one axis, which takes torch as long as a collective's other host time."""

    mesh: DeviceMesh
    process_group: ProcessGroup
    group: str
    ranks: int
    rank: int


#: By the identity of their mesh, which they keep alive.
_axes: dict[int, _Axis] = {}


def _axis(mesh: DeviceMesh) -> _Axis:
    axis = _axes.get(id(mesh))
    if axis is None:
        if len(_axes) >= 256:
            _axes.clear()
        group = mesh.get_group()
        axis = _axes[id(mesh)] = _Axis(mesh, group, group.group_name, mesh.size(), mesh.get_local_rank())
    return axis


def group_of(mesh: DeviceMesh) -> ProcessGroup:
    """Return the process group of a mesh of one axis."""
    return _axis(mesh).process_group


def all_reduce(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over the ranks; ``tensor`` stays as it is.  The compiler may trace it."""
    if torch.compiler.is_compiling():
        return DTensor.from_local(tensor, mesh, [Partial()], run_check=False).full_tensor()
    return all_reduced(without_history(tensor), _axis(mesh).group)


def gather(part: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """Gather the ranks' parts to one tensor of ``size`` on ``dim``; only the last parts are shorter."""
    _, _, group, ranks, _ = _axis(mesh)
    full = gathered(_rows(without_history(part), dim, -(-size // ranks)), group, ranks)
    return _from_rows(full, part, dim, size)


def reduce_scatter(partial: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's part, on ``dim``, of the sum over the ranks."""
    (_, _, group, ranks, rank), size = _axis(mesh), partial.shape[dim]
    own = reduce_scattered(_rows(without_history(partial), dim, -(-size // ranks) * ranks), group, ranks)
    start, end = _bounds(size, ranks, rank)
    return _from_rows(own, partial, dim, end - start)


def without_history(tensor: Tensor) -> Tensor:
    """Return a tensor without a gradient, as in a forward or backward of an autograd function."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise CapabilityError(
            "gradients of gradients (create_graph=True) would be wrong over tp: leave create_graph out, and take "
            "differences of two backwards, or a model in one process"
        )
    return tensor


def own_part(full: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return a copy of this rank's part of a tensor that every rank has."""
    start, end = own_bounds(full.shape[dim], mesh)
    return full.narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)


def own_bounds(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return where this rank's part of a sharded dim starts and ends; DTensor shards in ceiling-sized chunks."""
    return _bounds(size, mesh.size(), mesh.get_local_rank())


def _bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    chunk = -(-size // ranks)
    start = min(size, chunk * rank)
    return start, min(size, start + chunk)


def _rows(tensor: Tensor, dim: int, length: int) -> Tensor:
    """Return contiguous rows ``[length, ...]`` of a dim, with zeros after its own."""
    rows = tensor.movedim(dim, 0) if dim else tensor
    if missing := length - rows.shape[0]:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    return rows.contiguous()


def _from_rows(rows: Tensor, like: Tensor, dim: int, size: int) -> Tensor:
    """Return the first rows as the dim of a contiguous tensor that is like another in all other dims."""
    whole = rows.shape[0] == size
    if dim == 0 and whole:
        return rows
    if whole and like.shape[:dim].numel() == 1:
        return rows.view(*like.shape[:dim], size, *like.shape[dim + 1 :])
    return rows.narrow(0, 0, size).movedim(0, dim).clone(memory_format=torch.contiguous_format)
