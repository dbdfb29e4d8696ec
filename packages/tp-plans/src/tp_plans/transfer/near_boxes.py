"""Boxes of a tensor by place, so that those near another box are found without a look at each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from tp_plans.transfer.boxes import Box


class NearBoxes:
    """Finds the boxes of one tensor that may overlap another one."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._count = len(boxes)
        starts = [{box[dim][0] for box in boxes} for dim in range(len(boxes[0]) if boxes else 0)]
        self._dim = max(range(len(starts)), key=lambda dim: len(starts[dim]), default=None)
        if self._dim is not None:  # else they are of one number, or there are none
            sides = [box[self._dim] for box in boxes]
            self._longest = max(stop - start for start, stop in sides)
            self._by_start = sorted(range(len(boxes)), key=lambda number: sides[number][0])
            self._starts = [sides[number][0] for number in self._by_start]

    def near(self, box: Box) -> Sequence[int]:
        """Return the number of every box that overlaps ``box``, and perhaps of others, in their order."""
        if self._dim is None:
            return range(self._count)
        start, stop = box[self._dim]
        first, last = bisect_right(self._starts, start - self._longest), bisect_left(self._starts, stop)
        return sorted(self._by_start[first:last])
