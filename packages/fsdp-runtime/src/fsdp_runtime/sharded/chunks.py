"""A tensor assembled from boxes of stored ones, and only as much of each as this rank needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_runtime.sharded.shard_offsets import local_slice

#: One slice a dim.
Box = tuple[slice, ...]

#: Reads a box of a stored tensor by name; the result has all of its dims.
Read = Callable[[str, Box], Tensor]


@dataclass(frozen=True)
class Piece:
    """A box of a target tensor, and where in a stored tensor its elements are.

    Args:
        source: the stored tensor's name.
        target: the box that is filled.
        start: where the elements begin in the source, one index a dim of it.
        dims: for every dim of the target the source's, ``None`` for one that the source lacks; what is left over
            of the source's dims has the size 1 in the piece.
    """

    source: str
    target: Box
    start: tuple[int, ...]
    dims: tuple[int | None, ...]

    def within(self, box: Box) -> Piece | None:
        """The part of the piece inside a box of the target; ``None`` where there is none."""
        target = tuple(
            slice(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
            for mine, theirs in zip(self.target, box, strict=True)
        )
        if any(side.stop <= side.start for side in target):
            return None
        start = list(self.start)
        for old, new, dim in zip(self.target, target, self.dims, strict=True):
            if dim is not None:
                start[dim] += new.start - old.start
        return replace(self, target=target, start=tuple(start))

    @property
    def stored(self) -> Box:
        """The box of the source that holds the elements."""
        size = [1] * len(self.start)
        for side, dim in zip(self.target, self.dims, strict=True):
            if dim is not None:
                size[dim] = side.stop - side.start
        return tuple(slice(first, first + count) for first, count in zip(self.start, size, strict=True))

    def in_target(self, tensor: Tensor) -> Tensor:
        """What was read from :attr:`stored`, with the target's dims."""
        used = [dim for dim in self.dims if dim is not None]
        left = [dim for dim in range(tensor.ndim) if dim not in used]
        return tensor.permute([*used, *left]).reshape([side.stop - side.start for side in self.target])


def whole(name: str, shape: Sequence[int]) -> Piece:
    """The piece that takes a stored tensor as it is."""
    return Piece(name, tuple(slice(0, size) for size in shape), (0,) * len(shape), tuple(range(len(shape))))


def covers(pieces: Iterable[Piece], shape: Sequence[int]) -> bool:
    """Whether pieces that do not overlap fill a tensor."""
    return sum(box_size(piece.target) for piece in pieces) == math.prod(shape)


@torch.no_grad()
def fill(tensor: Tensor, pieces: Sequence[Piece], read: Read) -> None:
    """Fill this rank's part of a tensor, reading no more than that; values are converted to its dtype."""
    local, own = own_part(tensor)
    for piece in pieces:
        if (needed := piece.within(own)) is not None:
            inside = tuple(
                slice(side.start - mine.start, side.stop - mine.start)
                for side, mine in zip(needed.target, own, strict=True)
            )
            local[inside].copy_(needed.in_target(read(needed.source, needed.stored)))


def own_part(tensor: Tensor) -> tuple[Tensor, Box]:
    """This rank's plain tensor, and the box of the full one that it is."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(), local_slice(tensor)
    return tensor, tuple(slice(0, size) for size in tensor.shape)


def box_size(box: Box) -> int:
    """How many elements a box has."""
    return math.prod(side.stop - side.start for side in box)
