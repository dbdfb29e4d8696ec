"""Fill this rank's shard of a tensor from boxes of stored tensors, reading only the boxes that the rank needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_runtime.sharded.shard_offsets import dtensor_box
from tp_plans.boxes import Box, box_shape, full_box, intersection, split_box

#: Bytes per read; they are converted, or copied to a device, before the next read.
_READ_AT_ONCE = 2**24

#: Reads a box of a stored tensor by name; the result has all dims of the stored tensor.
ReadBox = Callable[[str, Box], Tensor]


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a target tensor and its position in a stored tensor."""

    source: str  # name of the stored tensor
    target: Box
    start: tuple[int, ...]  # index of the first element in the source
    dims: tuple[int | None, ...]  # source dim of each target dim; ``None`` for a target dim of size 1

    def intersect(self, box: Box) -> Chunk | None:
        """Return the part of the chunk inside a box of the target, ``None`` if it is empty."""
        if (target := intersection(self.target, box)) is None:
            return None
        start = list(self.start)
        for (old, _), (new, _), dim in zip(self.target, target, self.dims, strict=True):
            if dim is not None:
                start[dim] += new - old
        return replace(self, target=target, start=tuple(start))

    @property
    def source_box(self) -> Box:
        """The box of the source that holds the chunk's elements."""
        size = [1] * len(self.start)
        for count, dim in zip(box_shape(self.target), self.dims, strict=True):
            if dim is not None:
                size[dim] = count
        return tuple((first, first + count) for first, count in zip(self.start, size, strict=True))

    def target_of(self, part: Box) -> Box:
        """Return the box of the target for a part of :attr:`source_box`."""
        moved = [(low - first, high - first) for (low, high), first in zip(part, self.start, strict=True)]
        return tuple(
            side if dim is None else (side[0] + moved[dim][0], side[0] + moved[dim][1])
            for side, dim in zip(self.target, self.dims, strict=True)
        )

    def to_target(self, tensor: Tensor) -> Tensor:
        """Return a view of the values of :attr:`source_box` in the target's dims."""
        return in_dims(tensor, self.dims, box_shape(self.target))


def in_dims(tensor: Tensor, dims: Sequence[int | None], shape: Sequence[int]) -> Tensor:
    """Return a view of a tensor with the given dims; ``None`` adds a dim of size 1, and omitted dims have size 1."""
    used = [dim for dim in dims if dim is not None]
    unused = [dim for dim in range(tensor.ndim) if dim not in used]
    return tensor.permute([*used, *unused]).view(tuple(shape))


def identity_chunk(name: str, shape: Sequence[int]) -> Chunk:
    """Return the chunk that maps a stored tensor to a target of the same shape."""
    return whole_chunk(name, full_box(shape))


def whole_chunk(name: str, target: Box) -> Chunk:
    """Return the chunk of a full stored tensor, at a box of the target."""
    return Chunk(name, target, (0,) * len(target), tuple(range(len(target))))


def slices_of(box: Box) -> tuple[slice, ...]:
    """Return the slices that select a box of a tensor."""
    return tuple(slice(*side) for side in box)


def inside(box: Box, part: Box) -> tuple[slice, ...]:
    """Return the slices of a part of a box, in a tensor of the box's shape."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, box, strict=True))


def fill_local(tensor: Tensor, chunks: Sequence[Chunk], read: ReadBox) -> None:
    """Fill this rank's shard of a tensor; only its values are read. They are converted to the tensor's dtype."""
    fill_box(*local_part(tensor), chunks, read)


@torch.no_grad()
def fill_box(part: Tensor, box: Box, chunks: Sequence[Chunk], read: ReadBox) -> None:
    """Fill ``part``, the values of a tensor at ``box``."""
    for chunk in chunks:
        if (needed := chunk.intersect(box)) is not None:
            for piece in split_box(needed.source_box, _READ_AT_ONCE // part.itemsize):
                target = needed.target_of(piece)
                part[inside(box, target)].copy_(in_dims(read(needed.source, piece), needed.dims, box_shape(target)))


def read_box(box: Box, dtype: torch.dtype, chunks: Sequence[Chunk], read: ReadBox) -> Tensor:
    """Return the values of a tensor at ``box``, on the CPU."""
    part = torch.empty(box_shape(box), dtype=dtype)
    fill_box(part, box, chunks, read)
    return part


@torch.no_grad()
def fill_from(tensor: Tensor, full: Tensor) -> None:
    """Fill this rank's shard of a tensor with its part of the full values."""
    part, box = local_part(tensor)
    part.copy_(full[slices_of(box)])


def local_part(tensor: Tensor) -> tuple[Tensor, Box]:
    """Return this rank's local tensor and its box of the full tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(), dtensor_box(tensor)
    return tensor, full_box(tensor.shape)
