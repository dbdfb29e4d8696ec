"""Boxes: rectangular parts of a tensor, as one half-open range per dim."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

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
    for low, high in pairwise(sorted({border for number in numbers for border in boxes[number][dim]})):
        inside = [number for number in inside if boxes[number][dim][1] > low]
        if low in starting:
            inside = sorted([*inside, *starting[low]])
        if inside:
            yield from ((((low, high), *rest), found) for rest, found in _cells(boxes, inside, dim + 1))


def split_box(box: Box, limit: int) -> list[Box]:
    """Cut a box into boxes of at most ``limit`` elements, along its first dims, in row-major order."""
    if volume(box) <= limit:
        return [box]
    dim = next(index for index, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, limit // (volume(box) // (stop - start)))
    parts = [(*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :]) for low in range(start, stop, step)]
    return [small for part in parts for small in split_box(part, limit)]
