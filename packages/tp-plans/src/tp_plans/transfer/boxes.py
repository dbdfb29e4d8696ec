"""Boxes: rectangular parts of a tensor, as one half-open range per dim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

#: Start and stop of each dim.
Box = tuple[tuple[int, int], ...]

#: Boxes that several ranks can send are shared out in parts of at most this many bytes.
SHARED_BYTES = 4 * 2**20


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


def difference(box: Box, cut: Box) -> list[Box]:
    """The parts of a box outside ``cut``, as boxes that do not overlap."""
    common = intersection(box, cut)
    if common is None:
        return [box]
    parts: list[Box] = []
    rest = list(box)
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, common, strict=True)):
        for side in ((start, first), (last, stop)):
            if side[0] < side[1]:
                parts.append((*rest[:dim], side, *rest[dim + 1 :]))
        rest[dim] = (first, last)
    return parts


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """Boxes that do not overlap and cover the same elements; those that overlapped no earlier one are kept whole."""
    found: list[Box] = []
    for box in boxes:
        found += uncovered(box, found)
    return found


def uncovered(box: Box, covering: Iterable[Box]) -> list[Box]:
    """The parts of a box that no box of ``covering`` has."""
    left = [box] if volume(box) else []
    for other in covering:
        left = [part for piece in left for part in difference(piece, other)]
    return left


def cells(boxes: Iterable[Box]) -> list[Box]:
    """Boxes that do not overlap and cover what some boxes cover, each of them in full inside or outside of each."""
    found: list[Box] = []
    for box in boxes:
        cut: list[Box] = []
        for cell in found:
            common = intersection(cell, box)
            cut += [cell] if common is None else [common, *difference(cell, common)]
        found = cut + uncovered(box, cut)
    return found


def split_box(box: Box, limit: int) -> list[Box]:
    """Cut a box into boxes of at most ``limit`` elements, along its first dims, in row-major order."""
    if volume(box) <= limit:
        return [box]
    dim = next(index for index, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, limit // (volume(box) // (stop - start)))
    parts = [(*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :]) for low in range(start, stop, step)]
    return [small for part in parts for small in split_box(part, limit)]
