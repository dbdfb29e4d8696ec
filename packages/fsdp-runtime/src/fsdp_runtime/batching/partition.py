"""Partition items into rows with enough room and about the same work.

Every function takes about ``n log n`` steps for ``n`` items, except differencing, which serves few items.

Sources: Graham, *Bounds on multiprocessing timing anomalies*, 1969 (largest processing time first); Karmarkar and
Karp, *The differencing method of set partitioning*, 1982; Martello and Toth, *Lower bounds and reduction procedures
for the bin packing problem*, 1990.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

#: Above this number of items times rows, differencing takes longer than all other steps and gains little.
_MAX_DIFFERENCING = 400_000
#: This many rows with the least work are tried before the row with the most room.
_PROBES = 16

Row = list[int]


@dataclass(frozen=True)
class Items:
    """Tokens and work of the items to assign to rows; work has any unit."""

    tokens: Sequence[int]
    work: Sequence[float]
    capacity: int  # tokens that a row can hold

    def tokens_of(self, row: Iterable[int]) -> int:
        """Return the tokens of the items in a row."""
        return sum(self.tokens[item] for item in row)

    def work_of(self, row: Iterable[int]) -> float:
        """Return the work of the items in a row."""
        return sum(self.work[item] for item in row)


def least_rows(items: Items) -> int:
    """Return a lower bound of the number of rows (Martello and Toth)."""
    # Items longer than ``capacity - k`` share no row with items of ``k`` or more tokens. So each item longer than half
    # a row needs a row. Further rows are needed if the other items of at least ``k`` tokens exceed the room left.
    tokens = sorted(items.tokens, reverse=True)
    total, capacity = [0, *accumulate(tokens)], items.capacity
    half = sum(2 * length > capacity for length in tokens)
    best, alone = -(-total[-1] // capacity), 0
    for stop in range(len(tokens), half, -1):
        while alone < half and tokens[alone] > capacity - tokens[stop - 1]:
            alone += 1
        beside = (half - alone) * capacity - (total[half] - total[alone])
        best = max(best, half - (min(beside - total[stop] + total[half], 0) // capacity))
    return max(best, half)


def partitions(items: Items, order: Sequence[int], rows: int) -> list[list[Row]]:
    """Return partitions of items, in ``order`` of the most work, into rows; rows and the list may be empty."""
    choices = [_largest_first(items, order, rows)]
    if len(order) * rows <= _MAX_DIFFERENCING:
        choices.append(_fitting(items, _differencing(items, list(order), rows)))
    fitting = [partition for partition in choices if partition is not None]
    if not fitting:
        filled = best_fit(items, order)
        fitting = [filled + [[] for _ in range(rows - len(filled))]] if len(filled) <= rows else []
    return fitting


def best_fit(items: Items, order: Iterable[int]) -> list[Row]:
    """Assign each item, the longest first, to the row with the least sufficient room, or to a new row."""
    rows: list[Row] = []
    rooms: list[tuple[int, int]] = []  # room and row, the least room first
    for item in sorted(order, key=lambda item: (-items.tokens[item], item)):
        tokens = items.tokens[item]
        place = bisect_left(rooms, (tokens, 0))
        if place == len(rooms):
            room, row = items.capacity, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(place)
        rows[row].append(item)
        insort(rooms, (room - tokens, row))
    return rows


def _largest_first(items: Items, order: Sequence[int], rows: int) -> list[Row] | None:
    """Assign each item, the most work first, to the row with the least work and enough room (Graham)."""
    filled: list[Row] = [[] for _ in range(rows)]
    room, work = [items.capacity] * rows, [0.0] * rows
    lightest = [(0.0, row) for row in range(rows)]
    roomiest = [(-items.capacity, row) for row in range(rows)]
    lengths = [items.tokens[item] for item in order]
    shortest = list(accumulate(reversed(lengths), min))[::-1]
    for item, tokens, least in zip(order, lengths, shortest, strict=True):
        passed: list[tuple[float, int]] = []
        row = -1
        while lightest and row < 0 and len(passed) < _PROBES:
            entry = heapq.heappop(lightest)
            if entry[0] != work[entry[1]]:  # the row has changed since
                continue
            if room[entry[1]] >= tokens:
                row = entry[1]
            elif room[entry[1]] >= least:  # a row without room for any remaining item is dropped
                passed.append(entry)
        for entry in passed:
            heapq.heappush(lightest, entry)
        while row < 0 and roomiest:
            if -roomiest[0][0] == room[roomiest[0][1]]:
                row = roomiest[0][1]
            else:
                heapq.heappop(roomiest)
        if row < 0 or room[row] < tokens:
            return None
        filled[row].append(item)
        room[row] -= tokens
        work[row] += items.work[item]
        heapq.heappush(lightest, (work[row], row))
        heapq.heappush(roomiest, (-room[row], row))
    return filled


def _differencing(items: Items, order: list[int], rows: int) -> list[Row]:
    """Karmarkar and Karp's method for several rows; it ignores tokens."""
    # Until one assignment is left, the two partial assignments with the largest differences between rows merge: the
    # row with the most work of one assignment joins the row with the least work of the other. A partial assignment has
    # only non-empty rows, the row with the most work first.
    heap: list[tuple[float, int, list[tuple[float, Row]]]] = []
    for number, item in enumerate(order):
        heap.append((-items.work[item] if rows > 1 else 0.0, number, [(items.work[item], [item])]))
    heapq.heapify(heap)
    number = len(order)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = _merged(one, other, rows)
        least = merged[-1][0] if len(merged) == rows else 0.0
        heapq.heappush(heap, (least - merged[0][0], number, merged))
        number += 1
    filled = [row for _, row in heap[0][2]] if heap else []
    return filled + [[] for _ in range(rows - len(filled))]


def _merged(one: list[tuple[float, Row]], other: list[tuple[float, Row]], rows: int) -> list[tuple[float, Row]]:
    """Add row ``i`` of one assignment to row ``rows - 1 - i`` of the other."""
    alone = max(0, rows - len(other))
    pairs = [
        (work + other[rows - 1 - index][0], row + other[rows - 1 - index][1])
        for index, (work, row) in enumerate(one[alone:], start=alone)
    ]
    merged = [*one[:alone], *pairs, *other[: max(0, rows - len(one))]]
    merged.sort(key=lambda entry: (-entry[0], entry[1]))
    return merged


def _fitting(items: Items, rows: list[Row]) -> list[Row] | None:
    """Move items out of rows with too many tokens: the shortest sufficient item to the row with the most room."""
    room = [items.capacity - items.tokens_of(row) for row in rows]
    for row in sorted(range(len(rows)), key=room.__getitem__):
        while room[row] < 0:
            other = max(range(len(rows)), key=room.__getitem__)
            movable = [item for item in rows[row] if items.tokens[item] <= room[other]]
            if not movable:
                return None
            enough = [item for item in movable if items.tokens[item] >= -room[row]]
            item = min(enough, key=items.tokens.__getitem__) if enough else max(movable, key=items.tokens.__getitem__)
            rows[row].remove(item)
            rows[other].append(item)
            room[row] += items.tokens[item]
            room[other] -= items.tokens[item]
    return rows
