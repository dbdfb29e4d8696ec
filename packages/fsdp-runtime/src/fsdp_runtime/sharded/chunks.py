"""Fill this rank's shard of a tensor from slices of stored tensors, reading only the slices the rank needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_runtime.sharded.shard_offsets import dtensor_slices
from tp_plans.transfer import Box

#: A rectangular part of a tensor: one slice per dim.
Slices = tuple[slice, ...]

#: Reads slices of a stored tensor by name; the result has all dims of the stored tensor.
ReadSlices = Callable[[str, Slices], Tensor]


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a target tensor and its position in a stored tensor."""

    source: str  # name of the stored tensor
    target: Slices
    start: tuple[int, ...]  # index of the first element in the source
    dims: tuple[int | None, ...]  # source dim of each target dim, if it has one; others have size 1

    def intersect(self, slices: Slices) -> Chunk | None:
        """Return the part of the chunk inside slices of the target, ``None`` if it is empty."""
        target = tuple(
            slice(max(own.start, other.start), min(own.stop, other.stop))
            for own, other in zip(self.target, slices, strict=True)
        )
        if any(side.stop <= side.start for side in target):
            return None
        start = list(self.start)
        for old, new, dim in zip(self.target, target, self.dims, strict=True):
            if dim is not None:
                start[dim] += new.start - old.start
        return replace(self, target=target, start=tuple(start))

    @property
    def source_slices(self) -> Slices:
        """The slices of the source that hold the chunk's elements."""
        size = [1] * len(self.start)
        for side, dim in zip(self.target, self.dims, strict=True):
            if dim is not None:
                size[dim] = side.stop - side.start
        return tuple(slice(first, first + count) for first, count in zip(self.start, size, strict=True))

    def to_target(self, tensor: Tensor) -> Tensor:
        """Permute and reshape a tensor read from :attr:`source_slices` to the target's dims."""
        used = [dim for dim in self.dims if dim is not None]
        unused = [dim for dim in range(tensor.ndim) if dim not in used]
        return tensor.permute([*used, *unused]).reshape([side.stop - side.start for side in self.target])


def identity_chunk(name: str, shape: Sequence[int]) -> Chunk:
    """Return the chunk that maps a stored tensor to an equal target."""
    return Chunk(name, full_slices(shape), (0,) * len(shape), tuple(range(len(shape))))


def full_slices(shape: Sequence[int]) -> Slices:
    """Return the slices that select a full tensor of ``shape``."""
    return tuple(slice(0, size) for size in shape)


def to_box(slices: Slices) -> Box:
    """Return slices as the first and the last index, exclusive, of each dim."""
    return tuple((side.start, side.stop) for side in slices)


def fill_local(tensor: Tensor, chunks: Sequence[Chunk], read: ReadSlices) -> None:
    """Fill this rank's shard of a tensor and read nothing else; values are converted to the tensor's dtype."""
    fill_slices(*local_part(tensor), chunks, read)


@torch.no_grad()
def fill_slices(part: Tensor, slices: Slices, chunks: Sequence[Chunk], read: ReadSlices) -> None:
    """Fill the part of a tensor that consists of these slices of it."""
    for chunk in chunks:
        if (needed := chunk.intersect(slices)) is not None:
            inside = tuple(
                slice(side.start - offset.start, side.stop - offset.start)
                for side, offset in zip(needed.target, slices, strict=True)
            )
            part[inside].copy_(needed.to_target(read(needed.source, needed.source_slices)))


def local_part(tensor: Tensor) -> tuple[Tensor, Slices]:
    """Return this rank's local tensor and the slices of the full tensor that it holds."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(), dtensor_slices(tensor)
    return tensor, full_slices(tensor.shape)
