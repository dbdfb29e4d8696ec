"""Collectives on plain tensors along one axis, without a gradient; parts have the sizes of ``torch.chunk``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from tp_plans.torch_styles._collectives_compat import all_reduced, gathered, reduce_scattered


def all_reduce(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over the ranks; ``tensor`` stays as it is.  The compiler may trace it."""
    if torch.compiler.is_compiling():
        return DTensor.from_local(tensor, mesh, [Partial()], run_check=False).full_tensor()
    return all_reduced(tensor, mesh.get_group())


def gather(part: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """Return the tensor, of ``size`` on ``dim``, whose parts the ranks have; only the last parts are shorter."""
    ranks = mesh.size()
    full = gathered(_rows(part, dim, -(-size // ranks)), mesh.get_group(), ranks)
    return _from_rows(full, part, dim, size)


def reduce_scatter(partial: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's part, on ``dim``, of the sum over the ranks."""
    ranks, size = mesh.size(), partial.shape[dim]
    own = reduce_scattered(_rows(partial, dim, -(-size // ranks) * ranks), mesh.get_group(), ranks)
    start, end = own_bounds(size, mesh)
    return _from_rows(own, partial, dim, end - start)


def own_part(full: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return a copy of this rank's part of a tensor that every rank has."""
    start, end = own_bounds(full.shape[dim], mesh)
    return full.narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)


def own_bounds(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return where this rank's part of a sharded dim starts and ends; DTensor shards in ceiling-sized chunks."""
    chunk = -(-size // mesh.size())
    start = min(size, chunk * mesh.get_local_rank())
    return start, min(size, start + chunk)


def _rows(tensor: Tensor, dim: int, length: int) -> Tensor:
    """Return contiguous rows ``[length, ...]`` of a dim, with zeros after its own."""
    rows = tensor.movedim(dim, 0)
    if missing := length - len(rows):
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    return rows.contiguous()


def _from_rows(rows: Tensor, like: Tensor, dim: int, size: int) -> Tensor:
    """Return the first rows as the dim of a contiguous tensor that is like another in all other dims."""
    if dim == 0 and len(rows) == size:
        return rows
    if len(rows) == size and like.shape[:dim].numel() == 1:
        return rows.view(*like.shape[:dim], size, *like.shape[dim + 1 :])
    return rows.narrow(0, 0, size).movedim(0, dim).clone(memory_format=torch.contiguous_format)
