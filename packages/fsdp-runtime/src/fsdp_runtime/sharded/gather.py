"""Full tensors from shards, a bucket of parameters at once.

DTensor's ``full_tensor()`` waits for each parameter in turn.  Here the gathers of a bucket are in flight together, and
the shards of small parameters share one, so that they do not pay for a collective each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import all_gather_flat
from fsdp_runtime.sharded.shard_offsets import Cut, cuts, local_slice

#: From this many bytes on, a shard is gathered by itself, which saves copying it into a buffer and out again.
_LARGE = 2**20
#: Where a tensor may begin in a packed buffer, in bytes: a multiple of every dtype's size.
_ALIGNMENT = 16


@dataclass
class _Piece:
    """A tensor on its way to being full: what this rank has of it, and the cuts that are still to be undone."""

    tensor: Tensor
    undo: list[tuple[ProcessGroup, Cut, int]]  # each with the dim's size before the cut, last cut last


@dataclass(frozen=True)
class _Packed:
    """Where the shards of one tensor lie in a gathered buffer of one row of bytes a rank."""

    rows: Tensor
    work: dist.Work
    offset: int
    shape: tuple[int, ...]  # of one rank's chunk, padded, the cut dim first
    dtype: torch.dtype
    dim: int
    size: int

    def tensor(self) -> Tensor:
        """The piece with the cut undone; waits for the bytes."""
        self.work.wait()
        count = _count(self.shape) * self.dtype.itemsize
        chunks = self.rows[:, self.offset : self.offset + count].view(self.dtype)
        whole = chunks.reshape(len(self.rows) * self.shape[0], *self.shape[1:])
        # Chunks are full but for the last ones, so all padding is at the end.
        return whole.narrow(0, 0, self.size).movedim(0, self.dim)


def full_tensors(tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The full tensors of shards, in order; plain ones as they are.  Collective: every rank passes the same.

    All communication is started before the first tensor comes; each is waited for when it is asked for.

    Args:
        tensors: parameters and buffers, plain or DTensors on any meshes.
        dtype: what to convert floating-point tensors to, before they are communicated.
    """
    pieces = [_piece(tensor.detach(), dtype) for tensor in tensors]
    ready: list[Tensor | _Packed] = [piece.tensor for piece in pieces]
    while waiting := [index for index, piece in enumerate(pieces) if piece.undo]:
        by_group: dict[ProcessGroup, list[int]] = {}
        for index in waiting:
            by_group.setdefault(pieces[index].undo[-1][0], []).append(index)
        for group, members in by_group.items():
            gathered = _gather([pieces[index] for index in members], group)
            for index, packed in zip(members, gathered, strict=True):
                pieces[index].undo.pop()
                ready[index] = packed
                if pieces[index].undo:
                    pieces[index].tensor = packed.tensor()
                else:
                    pieces[index].tensor = torch.empty(0)  # its bytes are in the buffer now
            del gathered
    pieces.clear()
    for index, value in enumerate(ready):
        ready[index] = torch.empty(0)
        yield value.tensor().contiguous() if isinstance(value, _Packed) else value


def _piece(tensor: Tensor, dtype: torch.dtype | None) -> _Piece:
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    if not isinstance(tensor, DTensor):
        return _Piece(tensor, [])
    local_slice(tensor)  # raises where what this rank holds is not what is due
    mesh = tensor.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    size, undo = list(tensor.shape), []
    for cut in cuts(tensor.placements, mesh.shape):
        if cut.parts > 1:
            undo.append((mesh.get_group(cut.axis), cut, size[cut.dim]))
        size[cut.dim] = cut.own(size[cut.dim], coordinate[cut.axis])[1]
    return _Piece(tensor.to_local().to(mesh.device_type), undo)  # shards may be offloaded, collectives are not


def _gather(pieces: list[_Piece], group: ProcessGroup) -> list[_Packed]:
    """Undo the last cut of each piece: large ones by an all-gather each, the others by one, all in flight at once."""
    small = [piece for piece in pieces if piece.tensor.nbytes < _LARGE]
    packs = [[piece] for piece in pieces if piece.tensor.nbytes >= _LARGE] + ([small] if small else [])
    packed = {id(piece): result for pack in packs for piece, result in zip(pack, _launch(pack, group), strict=True)}
    return [packed[id(piece)] for piece in pieces]


def _launch(pieces: list[_Piece], group: ProcessGroup) -> list[_Packed]:
    """Start one all-gather of the pieces' shards."""
    shards = [piece.tensor.movedim(piece.undo[-1][1].dim, 0) for piece in pieces]
    shapes, starts, total = [], [], 0
    for piece, shard in zip(pieces, shards, strict=True):
        _, cut, size = piece.undo[-1]
        shapes.append((cut.chunk(size), *shard.shape[1:]))
        starts.append(total)
        total += -(-_count(shapes[-1]) * shard.itemsize // _ALIGNMENT) * _ALIGNMENT
    total = max(total, _ALIGNMENT)  # a row without bytes could not be viewed as other dtypes
    if len(shards) == 1 and shards[0].is_contiguous() and shards[0].nbytes == total:
        own = shards[0].view(-1).view(torch.uint8)
    else:
        own = torch.empty(total, dtype=torch.uint8, device=shards[0].device)
        for shard, start, shape in zip(shards, starts, shapes, strict=True):
            chunk = own[start : start + _count(shape) * shard.itemsize].view(shard.dtype).view(shape)
            chunk[: len(shard)].copy_(shard)
    everyone = own.new_empty(dist.get_world_size(group), total)
    work = all_gather_flat(everyone.view(-1), own, group)
    return [
        _Packed(everyone, work, start, shape, piece.tensor.dtype, piece.undo[-1][1].dim, piece.undo[-1][2])
        for piece, start, shape in zip(pieces, starts, shapes, strict=True)
    ]


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
