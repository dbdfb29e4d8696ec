"""The least loaded of some ranks, without a look at each of them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


class LeastLoaded:
    """Answers which rank of a set has the least load, and of several the lowest.

    Args:
        load: the load of each rank; it may only grow.
    """

    def __init__(self, load: Mapping[int, int]) -> None:
        self._load = load
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._known: dict[int, tuple[Sequence[int], list[tuple[int, int]]]] = {}

    def of(self, ranks: Sequence[int]) -> int:
        """Return the rank; ``ranks`` does not change while this object lives."""
        if len(ranks) == 1:
            return ranks[0]
        heap = self._heap(ranks)
        while heap[0][0] != (now := self._load[heap[0][1]]):  # loads only grow: what is out of date is too small
            heapq.heapreplace(heap, (now, heap[0][1]))
        return heap[0][1]

    def _heap(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """The heap that equal ranks share; found by identity first, as the hash of a long tuple takes long."""
        if id(ranks) not in self._known:
            key = tuple(ranks)
            if key not in self._heaps:
                self._heaps[key] = [(self._load[rank], rank) for rank in ranks]
                heapq.heapify(self._heaps[key])
            self._known[id(ranks)] = ranks, self._heaps[key]  # ``ranks`` is kept, so that no other has its identity
        return self._known[id(ranks)][1]
