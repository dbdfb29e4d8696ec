"""Which of the ranks that have a part sends it: as many bytes from each, known without going through the parts."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tp_plans.transfer.cuts import Cut, Run


class Segment(NamedTuple):
    """The bytes of one kind of tensors on a line: those of each run of parts, copy by copy, tensor by tensor."""

    start: int
    cut: Cut
    runs: Sequence[Run]
    tensors: int


class Line:
    """Everything that the same ranks share out, one byte after another; each rank has an interval of it."""

    # A part belongs to the rank whose interval has its middle. Tensors of one kind vary fastest on the line, so that
    # each rank has its part of every layer where there are enough parts.

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.nbytes = 0
        self._segments: list[Segment] = []
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, cut: Cut, runs: Sequence[Run], nbytes: int, tensors: int) -> Segment:
        """Append the runs of one kind, of so many bytes a tensor."""
        segment = Segment(self.nbytes, cut, runs, tensors)
        self._segments.append(segment)
        self._starts.append(self.nbytes)
        self.nbytes += nbytes * tensors
        return segment

    def level(self, load: MutableMapping[int, int]) -> None:
        """Share the line out so that loads become as equal as they can, and add each rank's bytes to its load."""
        quotas = _levelled([load.get(rank, 0) for rank in self.ranks], self.nbytes)
        self._stops = list(accumulate(quotas))
        for rank, nbytes in self.shares().items():
            load[rank] = load.get(rank, 0) + nbytes

    def shares(self) -> dict[int, int]:
        """The bytes that belong to each rank."""
        edges = [0, *(self._edge(stop) for stop in self._stops[:-1]), self.nbytes]
        return {rank: edges[place + 1] - edges[place] for place, rank in enumerate(self.ranks)}

    def _edge(self, stop: int) -> int:
        """Where the first part begins whose middle is at or after a byte."""
        if not self._segments or stop >= self.nbytes:
            return self.nbytes
        number = bisect_right(self._starts, stop) - 1
        found = self._edge_in(self._segments[number], stop)
        after = self._starts[number + 1] if number + 1 < len(self._starts) else self.nbytes
        return after if found is None else found

    def _edge_in(self, segment: Segment, stop: int) -> int | None:
        inside = stop - segment.start
        place = bisect_right(segment.runs, inside, key=lambda run: run.start * segment.tensors) - 1
        run = segment.runs[place]
        size, first = segment.cut.parts[run.part].nbytes, run.start * segment.tensors
        number = max(0, -(-(2 * (inside - first) - size) // (2 * size)))
        end = first + number * size
        return segment.start + end if place + 1 < len(segment.runs) or number < run.copies * segment.tensors else None

    def senders(self, segment: Segment, start: int, nbytes: int, copy: int) -> Iterator[tuple[int, int, int]]:
        """Yield the rank of each tensor's copy of a part, as a rank, the first tensor and that after the last."""
        # The part begins at ``start`` in the runs of one tensor.
        base = segment.start + start * segment.tensors + copy * nbytes * segment.tensors
        first = 0
        while first < segment.tensors:
            middle = 2 * (base + first * nbytes) + nbytes
            place = bisect_right(self._stops, middle, key=lambda stop: 2 * stop)
            last = -(-(2 * (self._stops[place] - base) - nbytes) // (2 * nbytes))  # middles before the stop
            last = min(segment.tensors, max(last, first + 1))
            yield self.ranks[place], first, last
            first = last


class Lines:
    """The lines of all sets of ranks."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, ...], Line] = {}

    def of(self, ranks: tuple[int, ...]) -> Line:
        """The line of some ranks."""
        if ranks not in self._lines:
            self._lines[ranks] = Line(ranks)
        return self._lines[ranks]

    def level(self, load: MutableMapping[int, int]) -> None:
        """Share all of them out, those of the fewest ranks first: the others can make up for what they leave."""
        for line in sorted(self._lines.values(), key=lambda each: len(each.ranks)):
            line.level(load)

    def shares(self) -> Mapping[int, int]:
        """The bytes that belong to each rank."""
        found: dict[int, int] = defaultdict(int)
        for line in self._lines.values():
            for rank, nbytes in line.shares().items():
                found[rank] += nbytes
        return found

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines.values())


def _levelled(loads: Sequence[int], nbytes: int) -> list[int]:
    """Split bytes so that the loads become as equal as they can."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    total, count = 0, 0
    for count, place in enumerate(order, start=1):
        total += loads[place]
        if count == len(order) or loads[order[count]] * count - total >= nbytes:
            break
    level, rest = divmod(total + nbytes, max(count, 1))
    quotas = [0] * len(loads)
    for number, place in enumerate(order[:count]):
        quotas[place] = level + (number < rest) - loads[place]
    return quotas
