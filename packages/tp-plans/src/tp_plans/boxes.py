"""Boxes: rectangular parts of a tensor, one half-open range per dim, and the boxes that ranks of a mesh store.

A box:      ``Box``, ``full_box``, ``box_shape``, ``volume``, ``intersection``, ``split_box``
Of a mesh:  ``mesh_boxes``, ``MeshLayout``, ``StridedShard``, ``ShardStep``, ``shard_steps``

Placements are as in DTensor and FSDP2.  Torch is not needed.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tp_plans._validate import MAX_RANKS
from tp_plans.errors import PlanError, TransferError
from tp_plans.layouts import Replicate, Shard

__all__ = [
    *("Box", "MeshLayout", "ShardStep", "StridedShard", "box_shape", "full_box", "intersection", "mesh_boxes"),
    *("shard_steps", "split_box", "volume"),
]

#: Start and stop of each dim.
Box = tuple[tuple[int, int], ...]


def full_box(shape: Sequence[int]) -> Box:
    """The box of a full tensor."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """The sizes of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """The common part of two boxes of one tensor; ``None`` where there is none."""
    common = []
    for (start, stop), (first, last) in zip(one, other, strict=True):
        low, high = max(start, first), min(stop, last)
        if high <= low:
            return None
        common.append((low, high))
    return tuple(common)


def cells(boxes: Sequence[Box]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Cut boxes by the borders of all of them; yield each part once, with the numbers of the boxes that have it."""
    if boxes:
        yield from _cells(boxes, range(len(boxes)), 0)


def _cells(boxes: Sequence[Box], numbers: Sequence[int], dim: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Cut some boxes into slices along a dim, and each slice along the dims after it."""
    if dim == len(boxes[numbers[0]]):
        yield (), tuple(numbers)
        return
    starting: dict[int, list[int]] = defaultdict(list)
    for number in numbers:
        starting[boxes[number][dim][0]].append(number)
    inside: list[int] = []
    for low, high in itertools.pairwise(sorted({border for number in numbers for border in boxes[number][dim]})):
        inside = [number for number in inside if boxes[number][dim][1] > low]
        if low in starting:
            inside = sorted([*inside, *starting[low]])
        if inside:
            yield from ((((low, high), *rest), holders) for rest, holders in _cells(boxes, inside, dim + 1))


def split_box(box: Box, limit: int) -> list[Box]:
    """Cut a box into boxes of at most ``limit`` elements, along its first dims, in row-major order."""
    if volume(box) <= limit:
        return [box]
    dim = next(index for index, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, limit // (volume(box) // (stop - start)))
    parts = [(*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :]) for low in range(start, stop, step)]
    return [small for part in parts for small in split_box(part, limit)]


@dataclass(frozen=True, slots=True)
class StridedShard:
    """A shard that is cut after the axes to its right, as FSDP2 cuts ``tp``'s shards (torch's ``_StridedShard``).

    Args:
        dim: the sharded dim.
    """

    dim: int

    def __post_init__(self) -> None:
        if type(self.dim) is not int or self.dim < 0:
            raise PlanError(f"{self.dim!r} is not a dim: write 0 or more")

    def __str__(self) -> str:
        return f"strided_shard({self.dim})"


MeshLayout = Replicate | Shard | StridedShard


@dataclass(frozen=True, slots=True)
class ShardStep:
    """One sharding of a tensor: dim ``dim`` of the part left by earlier steps, into ``num_chunks`` over an axis."""

    axis: int  # index of the mesh axis
    dim: int  # the tensor dim
    num_chunks: int  # size of the mesh axis

    def chunk_size(self, size: int) -> int:
        """Return the size of a full chunk of ``size``; as in ``torch.chunk``, the last chunks are shorter or empty."""
        return -(-size // self.num_chunks)

    def chunk_range(self, size: int, index: int) -> tuple[int, int]:
        """Return the start and the length of chunk ``index`` of ``size``."""
        start = min(size, self.chunk_size(size) * index)
        return start, min(size - start, self.chunk_size(size))


def shard_steps(layouts: Sequence[MeshLayout], mesh_shape: Sequence[int]) -> list[ShardStep]:
    """Return the sharding steps in an order that reproduces every rank's shard.

    Steps on different dims commute.  On one dim, plain shards apply from the first mesh axis to the last, while a
    strided shard applies after the axes to its right: FSDP2 shards after ``tp``, although its axis comes first in the
    mesh.  The last axis goes first wherever that is allowed, so that parameters sharded over ``tp`` and FSDP2 agree on
    the order.
    """
    ordered: list[ShardStep] = []
    for axis, layout in reversed(list(enumerate(layouts))):
        if isinstance(layout, (Shard, StridedShard)):
            step = ShardStep(axis, layout.dim, mesh_shape[axis])
            same_dim = (index for index, other in enumerate(ordered) if other.dim == step.dim)
            is_strided = isinstance(layout, StridedShard)
            ordered.insert(len(ordered) if is_strided else next(same_dim, len(ordered)), step)
    return ordered


def mesh_boxes(shape: Sequence[int], mesh_shape: Sequence[int], layouts: Sequence[MeshLayout]) -> list[Box]:
    """Return the box that each rank of a mesh holds, in the mesh's row-major order.

    Chunks are cut as by ``torch.chunk``: ceiling-sized, the last ones shorter or empty.

    Args:
        shape: the full tensor's shape.
        mesh_shape: the sizes of the mesh's axes.
        layouts: one per axis: ``Replicate()``, ``Shard(dim)``, or ``StridedShard(dim)`` for FSDP2's shards of a dim
            that an axis to the right has cut.

    Returns:
        One box per rank; a box of an empty shard has a dim of size 0.

    Raises:
        TransferError: there is not one layout per axis, a layout's dim is not one of the tensor's, or a size is out of
            range.

    Example:
        >>> import tp_plans
        >>> tp_plans.boxes.mesh_boxes((5, 4), (2, 2), [tp_plans.Shard(0), tp_plans.Shard(1)])
        [((0, 3), (0, 2)), ((0, 3), (2, 4)), ((3, 5), (0, 2)), ((3, 5), (2, 4))]
    """
    if len(layouts) != len(mesh_shape):
        raise TransferError(f"{len(layouts)} layouts for a mesh of {len(mesh_shape)} axes: give one per axis")
    if min(mesh_shape, default=1) < 1 or math.prod(mesh_shape) > MAX_RANKS:
        raise TransferError(f"mesh_shape is {tuple(mesh_shape)}: give sizes of 1 or more, together at most {MAX_RANKS}")
    if min(shape, default=0) < 0:
        raise TransferError(f"shape is {tuple(shape)}: give sizes of 0 or more")
    normal = [_in_dims(layout, shape) for layout in layouts]
    steps = shard_steps(normal, mesh_shape)
    boxes = []
    for coordinate in itertools.product(*map(range, mesh_shape)):
        box = [(0, size) for size in shape]
        for step in steps:
            start, stop = box[step.dim]
            offset, length = step.chunk_range(stop - start, coordinate[step.axis])
            box[step.dim] = (start + offset, start + offset + length)
        boxes.append(tuple(box))
    return boxes


def _in_dims(layout: object, shape: Sequence[int]) -> MeshLayout:
    if isinstance(layout, Replicate):
        return layout
    if isinstance(layout, (Shard, StridedShard)) and -len(shape) <= layout.dim < len(shape):
        return type(layout)(layout.dim % len(shape))
    raise TransferError(
        f"{layout} is no layout of a tensor of shape {tuple(shape)} ({math.prod(shape)} elements): write Replicate(), "
        "Shard(dim) or StridedShard(dim)"
    )
