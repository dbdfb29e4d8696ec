"""Collectives on plain tensors along one axis, without a gradient; parts have the sizes of ``torch.chunk``.

They run in place on tensors of their own, which takes less time on the host than functional collectives.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

#: Renamed in 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over the ranks; ``tensor`` stays as it is.  The compiler may trace it."""
    if torch.compiler.is_compiling():
        return DTensor.from_local(tensor, mesh, [Partial()], run_check=False).full_tensor()
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.get_group())
    return total


def gather(part: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """Return the tensor, of ``size`` on ``dim``, whose parts the ranks have; only the last parts are shorter."""
    first = _leads(part, dim)
    each, rows = -(-size // mesh.size()), part if first else part.movedim(dim, 0)
    at = dim if first else 0
    shape = list(rows.shape)
    shape[at] = each * mesh.size()
    full = rows.new_empty(shape)
    _all_gather(full.view(-1), _padded(rows, at, each).view(-1), group=mesh.get_group())
    return _cut(full, at, size, dim)


def reduce_scatter(partial: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's part, on ``dim``, of the sum over the ranks."""
    first, size = _leads(partial, dim), partial.shape[dim]
    each, rows = -(-size // mesh.size()), partial if first else partial.movedim(dim, 0)
    at = dim if first else 0
    shape = list(rows.shape)
    shape[at] = each
    own = rows.new_empty(shape)
    _reduce_scatter(own.view(-1), _padded(rows, at, each * mesh.size()).view(-1), group=mesh.get_group())
    start, end = own_bounds(size, mesh)
    return _cut(own, at, end - start, dim)


def own_part(full: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return a copy of this rank's part of a tensor that every rank has."""
    start, end = own_bounds(full.shape[dim], mesh)
    return full.narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)


def own_bounds(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return where this rank's part of a sharded dim starts and ends; DTensor shards in ceiling-sized chunks."""
    chunk = -(-size // mesh.size())
    start = min(size, chunk * mesh.get_local_rank())
    return start, min(size, start + chunk)


def _leads(tensor: Tensor, dim: int) -> bool:
    """Return whether the parts of ``dim`` follow one another in memory: all dims before it have size 1."""
    return tensor.shape[:dim].numel() == 1


def _padded(rows: Tensor, dim: int, length: int) -> Tensor:
    """Return contiguous rows, with zeros up to a length."""
    if missing := length - rows.shape[dim]:
        shape = list(rows.shape)
        shape[dim] = missing
        rows = torch.cat([rows, rows.new_zeros(shape)], dim)
    return rows.contiguous()


def _cut(rows: Tensor, at: int, size: int, dim: int) -> Tensor:
    """Return the first rows, whose dim ``at`` is to be ``dim``, in memory of their own."""
    if rows.shape[at] == size and at == dim:
        return rows
    return rows.narrow(at, 0, size).movedim(at, dim).clone(memory_format=torch.contiguous_format)
