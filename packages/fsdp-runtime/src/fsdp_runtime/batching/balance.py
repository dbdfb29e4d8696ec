"""Assign sequences to the micro-batches of ranks, so that the ranks finish each micro-batch together.

Ranks wait for each other in the collectives of each micro-batch, so a step's time is the sum over the micro-batches of
the largest row.  Only the rows of one micro-batch need equal work.  Partitions of items into rows take about
``n log n`` steps for ``n`` items, except differencing, which serves few items.

Sources: Graham, *Bounds on multiprocessing timing anomalies*, 1969 (largest processing time first); Karmarkar and
Karp, *The differencing method of set partitioning*, 1982; Martello and Toth, *Lower bounds and reduction procedures
for the bin packing problem*, 1990.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

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
    heap: list[tuple[float, int, list[tuple[float, Row]]]] = [
        (-items.work[item] if rows > 1 else 0.0, number, [(items.work[item], [item])])
        for number, item in enumerate(order)
    ]
    heapq.heapify(heap)
    for number in range(len(order), 2 * len(order) - 1):
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = _merged(one, other, rows)
        least = merged[-1][0] if len(merged) == rows else 0.0
        heapq.heappush(heap, (least - merged[0][0], number, merged))
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


#: Rows stay unchanged if the most work is at most this multiple of their mean.
_BALANCED = 1.0002
#: Up to this many items are also exchanged between the rows of all micro-batches, for a small gain.
_FEW = 1000
#: A micro-batch takes items of other micro-batches if its largest row exceeds this multiple of the mean.
_ABOVE = 1.002
#: The row with the most work tries exchanges with this many rows of the least work.
_PARTNERS = 8
#: An exchange tries this many of a row's items on each side of the best amount of work.
_NEIGHBOURS = 8
#: Items to partition in all attempts with fewer micro-batches than best fit needs.
_TRIED_ITEMS = 40_000
#: Items to partition again in total, after a micro-batch with one dominating item.
_PARTITIONED_ITEMS = 16_000


def assign_rows(items: Items, ranks: int) -> list[list[Row]]:
    """Return the rows of each micro-batch, one per rank, with the fewest micro-batches found."""
    order = sorted(range(len(items.tokens)), key=lambda item: (-items.work[item], item))
    least = max(1, -(-least_rows(items) // ranks))
    enough = max(1, -(-len(best_fit(items, order)) // ranks))
    tried = min(enough, least + 1 + _TRIED_ITEMS // max(len(order), 1))
    schedule = None
    for micro_batches in (*range(least, tried), enough):
        schedule = schedule or _schedule(items, order, ranks, micro_batches, _PARTITIONED_ITEMS)
    return [rows[::-1] if index % 2 else rows for index, rows in enumerate(schedule or [])]  # not always the same rank


def step_work(items: Items, micro_batches: Iterable[Sequence[Row]]) -> float:
    """Return the work of a step: the sum over the micro-batches of the largest row's work."""
    return sum(max(items.work_of(row) for row in rows) for rows in micro_batches)


def lower_bound(items: Items, ranks: int) -> float:
    """Return a lower bound of :func:`step_work` over all assignments."""
    return max(sum(items.work) / ranks, max(items.work, default=0.0))


def _schedule(items: Items, order: list[int], ranks: int, micro_batches: int, budget: int) -> list[list[Row]] | None:
    """Return rows in groups, one per micro-batch, the most work first; ``None`` if the items do not fit."""
    # ``order`` has the items with the most work first. ``budget`` is the number of items that may be partitioned,
    # including the smaller problems that follow.
    partitioned = partitions(items, order, ranks * micro_batches)
    if len(order) <= _FEW:
        partitioned += [_exchanged(items, [list(row) for row in rows]) for rows in partitioned]
    candidates = [_grouped(items, rows, ranks) for rows in partitioned]
    if not candidates:
        return None
    groups = min(candidates, key=lambda schedule: step_work(items, schedule))
    mean = items.work_of(order) / (ranks * micro_batches)
    above = sum(max(map(items.work_of, group)) > mean * _ABOVE for group in groups)
    if 1 in (micro_batches, ranks) or above == 0:
        return groups
    # A row exceeds the mean: more items on the other ranks of its micro-batch cost no time.
    several = 1 if budget > 0 else above
    pool = sorted((items.work[item], item) for item in chain.from_iterable(chain.from_iterable(groups[several:])))
    filled = [[list(row) for row in group] for group in groups[:several]]
    taken = set(chain.from_iterable(_fill(items, group, pool) for group in filled))
    others = [_grouped(items, [[i for i in row if i not in taken] for row in chain(*groups[several:])], ranks)]
    if budget > 0:
        rest = [item for _, item in sorted((-work, item) for work, item in pool)]
        others.append(_schedule(items, rest, ranks, micro_batches - 1, budget - len(rest)) or others[0])
    return min([groups, *([*filled, *later] for later in others)], key=lambda schedule: step_work(items, schedule))


def _grouped(items: Items, rows: list[Row], ranks: int) -> list[list[Row]]:
    ordered = sorted(rows, key=items.work_of, reverse=True)
    return [_exchanged(items, ordered[start : start + ranks]) for start in range(0, len(ordered), ranks)]


def _fill(items: Items, rows: list[Row], pool: list[tuple[float, int]]) -> set[int]:
    """Move items from the pool into the rows, up to the work of the largest row; return the items."""
    taken: set[int] = set()
    work = [items.work_of(row) for row in rows]
    top = max(work)
    for index in sorted(range(len(rows)), key=work.__getitem__):
        room = items.capacity - items.tokens_of(rows[index])
        place = len(pool)
        while (place := bisect_left(pool, (top - work[index], len(items.tokens)), 0, place)) > 0:
            place = _that_fits(items, pool, place, room)
            if place < 0:
                break
            added, item = pool.pop(place)
            rows[index].append(item)
            taken.add(item)
            work[index] += added
            room -= items.tokens[item]
    return taken


def _that_fits(items: Items, pool: list[tuple[float, int]], stop: int, room: int) -> int:
    """Return the place of the item with the most work before ``stop`` that fits into ``room``, or -1."""
    # Work grows with tokens, if not strictly: the search halves the pool until few items are left, and tries each item.
    low, high = 0, stop
    while high - low > _NEIGHBOURS:
        middle = (low + high) // 2
        if items.tokens[pool[middle][1]] <= room:
            low = middle
        else:
            high = middle
    for place in range(high - 1, max(low - _NEIGHBOURS, 0) - 1, -1):
        if items.tokens[pool[place][1]] <= room:
            return place
    return -1


def _exchanged(items: Items, rows: list[Row]) -> list[Row]:
    """Move or exchange items between the row with the most work and other rows while the two rows become more even."""
    work = [items.work_of(row) for row in rows]
    room = [items.capacity - items.tokens_of(row) for row in rows]
    mean = sum(work) / len(rows)
    by_work = sorted((work[row], row) for row in range(len(rows)))
    for _ in range(4 * sum(map(len, rows))):
        most = by_work[-1][1]
        if work[most] <= mean * _BALANCED:
            break
        for _, other in by_work[: min(_PARTNERS, len(rows) - 1)]:
            exchange = _best_exchange(
                items, (rows[most], rows[other]), work[most] - work[other], (room[most], room[other])
            )
            if exchange is not None:
                for row in (most, other):
                    del by_work[bisect_left(by_work, (work[row], row))]
                moved, returned = exchange
                rows[most].remove(moved)
                rows[other].append(moved)
                if returned is not None:
                    rows[other].remove(returned)
                    rows[most].append(returned)
                for row in (most, other):
                    work[row] = items.work_of(rows[row])
                    room[row] = items.capacity - items.tokens_of(rows[row])
                    insort(by_work, (work[row], row))
                break
        else:
            break
    return rows


def _best_exchange(
    items: Items, rows: tuple[Row, Row], difference: float, room: tuple[int, int]
) -> tuple[int, int | None] | None:
    """Return the item to move from the first row, and the item to return, if any, for the least difference of work."""
    best, least = None, difference * (1 - 1e-9)
    first_items = sorted((items.work[item], item) for item in rows[0])
    second_items = sorted((items.work[item], item) for item in rows[1])
    for work, moved in first_items:
        place = bisect_left(second_items, (work - difference / 2, 0))
        near = second_items[max(place - _NEIGHBOURS, 0) : place + _NEIGHBOURS]
        for returned_work, returned in ((0.0, None), *near):
            distance = abs(difference - 2 * (work - returned_work))
            if distance < least:
                tokens = items.tokens[moved] - (0 if returned is None else items.tokens[returned])
                if -room[0] <= tokens <= room[1]:
                    best, least = (moved, returned), distance
    return best
