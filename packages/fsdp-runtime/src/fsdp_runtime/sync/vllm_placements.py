"""Placements over the trainer's ranks, in their order, that say which part of a weight each of them has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tp_plans.transfer import Box, TransferLayout


@dataclass(frozen=True)
class MeshPlacement:
    """One placement per axis of a row-major mesh over ranks 0 to ``world_size - 1``.

    Args:
        mesh_shape: sizes of the mesh's axes.
        dims: for each axis the dim that it shards in equal parts, or ``None`` where it replicates.
    """

    mesh_shape: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.mesh_shape)


def mesh_placement(layout: TransferLayout, tensor: str, world_size: int) -> MeshPlacement | None:
    """Return the placement of a tensor of which every rank has one part; ``None`` if no mesh of two axes says it."""
    blocks = {block.rank: block.box for block in layout.blocks(tensor)}
    if world_size < 2 or len(layout.blocks(tensor)) != world_size or sorted(blocks) != list(range(world_size)):
        return None
    shape = layout.tensors[tensor].shape
    wanted = [blocks[rank] for rank in range(world_size)]
    for candidate in _candidates(len(shape), world_size):
        if any(dim is not None for dim in candidate.dims) and _boxes(candidate, shape) == wanted:
            return candidate
    return None


def _candidates(rank: int, world_size: int) -> Iterator[MeshPlacement]:
    """Every placement over one or two axes: what vLLM's transports of shards can read."""
    for outer in range(1, world_size + 1):
        if world_size % outer:
            continue
        sizes = (world_size,) if outer == world_size else (outer, world_size // outer)
        if sizes[0] == 1 and len(sizes) == 2:
            continue
        for dims in itertools.product((None, *range(rank)), repeat=len(sizes)):
            yield MeshPlacement(sizes, dims)


def _boxes(placement: MeshPlacement, shape: tuple[int, ...]) -> list[Box] | None:
    """The part of each rank under a placement; ``None`` where parts would differ in size."""
    boxes = []
    for place in itertools.product(*map(range, placement.mesh_shape)):
        box = [(0, size) for size in shape]
        for index, size, dim in zip(place, placement.mesh_shape, placement.dims, strict=True):
            if dim is None:
                continue
            start, stop = box[dim]
            part, rest = divmod(stop - start, size)
            if rest or not part:
                return None
            box[dim] = (start + index * part, start + (index + 1) * part)
        boxes.append(tuple(box))
    return boxes
