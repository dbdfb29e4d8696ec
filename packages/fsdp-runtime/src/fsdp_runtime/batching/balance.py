"""Assignment of sequences to the micro-batches of ranks, so that the ranks finish each micro-batch together.

All ranks run the same number of micro-batches, because each one takes part in the collectives of FSDP2, and the ranks
wait for each other in each.  So the time of a step is the sum over its micro-batches of the largest row, and the lower
bound is the total work divided by the ranks.

Sources: Karmarkar and Karp, *The differencing method of set partitioning*, 1982; Graham, *Bounds on multiprocessing
timing anomalies*, 1969 (largest processing time first).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Above this number of items times rows, differencing would take seconds, and the exchanges do its work.
_MAX_DIFFERENCING = 10_000_000
#: Rows with at most this share more work than the mean are left as they are.
_BALANCED = 1.005
#: Exchanges between rows are tried against this many of the rows with the least work.
_PARTNERS = 8

Row = list[int]


@dataclass(frozen=True)
class Items:
    """What is assigned to rows.

    Args:
        tokens: the number of tokens of each item.
        work: the work of each item, in any unit.
        capacity: the number of tokens that a row can hold.
    """

    tokens: Sequence[int]
    work: Sequence[float]
    capacity: int

    def tokens_of(self, row: Iterable[int]) -> int:
        """Return the tokens of some items."""
        return sum(self.tokens[item] for item in row)

    def work_of(self, row: Iterable[int]) -> float:
        """Return the work of some items."""
        return sum(self.work[item] for item in row)


def assign_rows(items: Items, ranks: int) -> list[list[Row]]:
    """Return the items of each micro-batch on each rank, in the least number of micro-batches that was found to do.

    Args:
        items: each of at most ``capacity`` tokens.
        ranks: the number of data-parallel ranks.

    Returns:
        For each micro-batch, one row for each rank; a row may be empty.
    """
    order = sorted(range(len(items.tokens)), key=lambda item: (-items.work[item], item))
    needed = -(-items.tokens_of(order) // items.capacity)
    micro_batches = max(1, -(-needed // ranks))
    while True:
        found = _schedule(items, order, ranks, micro_batches)
        if found is not None:
            return [_turned(group, index) for index, group in enumerate(found)]
        micro_batches += 1


def step_work(items: Items, micro_batches: Iterable[Sequence[Row]]) -> float:
    """Return the sum over the micro-batches of the row with the most work."""
    return sum(max(items.work_of(row) for row in rows) for rows in micro_batches)


def lower_bound(items: Items, ranks: int) -> float:
    """Return a number that no assignment has a smaller :func:`step_work` than."""
    return max(sum(items.work) / ranks, max(items.work, default=0.0))


def _schedule(items: Items, order: list[int], ranks: int, micro_batches: int) -> list[list[Row]] | None:
    """Rows in groups of one micro-batch each, the groups with the most work first; ``None`` if they do not fit."""
    rows = _partition(items, order, ranks * micro_batches)
    if rows is None:
        return None
    rows.sort(key=items.work_of, reverse=True)
    groups = [rows[start : start + ranks] for start in range(0, len(rows), ranks)]
    top, mean = items.work_of(rows[0]), items.work_of(order) / len(rows)
    if micro_batches == 1 or top <= mean * _BALANCED:
        return groups
    # One row exceeds the others, so that its micro-batch can hold more on the other ranks for nothing.
    first, rest = _filled(items, groups[0], [item for row in rows[ranks:] for item in row], top)
    others = _schedule(items, sorted(rest, key=lambda item: (-items.work[item], item)), ranks, micro_batches - 1)
    if others is None:
        return groups
    return min(groups, [first, *others], key=lambda found: step_work(items, found))


def _filled(items: Items, rows: list[Row], pool: list[int], top: float) -> tuple[list[Row], list[int]]:
    """Move items from the pool into rows up to the work ``top``; return the rows and what is left of the pool."""
    filled = [list(row) for row in rows]
    left = []
    for item in sorted(pool, key=lambda item: (-items.work[item], item)):
        fitting = [
            row
            for row in filled
            if items.work_of(row) + items.work[item] <= top
            and items.tokens_of(row) + items.tokens[item] <= items.capacity
        ]
        if fitting:
            min(fitting, key=items.work_of).append(item)
        else:
            left.append(item)
    return filled, left


def _turned(rows: list[Row], index: int) -> list[Row]:
    """Rows in another order in every second micro-batch, so that no rank always has the most work."""
    return rows[::-1] if index % 2 else rows


def _partition(items: Items, order: list[int], rows: int) -> list[Row] | None:
    """The most even of several partitions into rows; ``None`` if none of them fits."""
    found = [_largest_first(items, order, rows)]
    if len(order) * rows <= _MAX_DIFFERENCING:
        found.append(_fitting(items, _differencing(items, order, rows)))
    fitting = [_exchanged(items, each) for each in found if each is not None]
    if not fitting:
        best_fit = _best_fit(items, rows, order)
        fitting = [] if best_fit is None else [_exchanged(items, best_fit)]
    return min(fitting, key=lambda each: max(map(items.work_of, each)), default=None)


def _largest_first(items: Items, order: list[int], rows: int) -> list[Row] | None:
    """Each item, the largest first, to the row with the least work that has room for it (Graham)."""
    heap = [(0.0, row) for row in range(rows)]
    found: list[Row] = [[] for _ in range(rows)]
    room = [items.capacity] * rows
    for item in order:
        full = []
        while heap and room[heap[0][1]] < items.tokens[item]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        work, row = heapq.heappop(heap)
        found[row].append(item)
        room[row] -= items.tokens[item]
        for entry in (*full, (work + items.work[item], row)):
            heapq.heappush(heap, entry)
    return found


def _differencing(items: Items, order: list[int], rows: int) -> list[Row]:
    """Karmarkar and Karp's method for several rows; tokens are not looked at.

    Two partial assignments whose rows differ most are merged, the row with the most work of one with the row with the
    least of the other, until one is left.
    """
    # Of each partial assignment the rows that are not empty, the one with the most work first.
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
    found = [row for _, row in heap[0][2]] if heap else []
    return found + [[] for _ in range(rows - len(found))]


def _merged(one: list[tuple[float, Row]], other: list[tuple[float, Row]], rows: int) -> list[tuple[float, Row]]:
    """Add the row ``i`` of one to the row ``rows - 1 - i`` of the other."""
    alone = max(0, rows - len(other))
    pairs = [
        (work + other[rows - 1 - index][0], row + other[rows - 1 - index][1])
        for index, (work, row) in enumerate(one[alone:], start=alone)
    ]
    merged = [*one[:alone], *pairs, *other[: max(0, rows - len(one))]]
    merged.sort(key=lambda entry: (-entry[0], entry[1]))
    return merged


def _best_fit(items: Items, rows: int, order: list[int]) -> list[Row] | None:
    """Each item, the longest first, to the row with the least room that is enough."""
    found: list[Row] = [[] for _ in range(rows)]
    room = [items.capacity] * rows
    for item in sorted(order, key=lambda item: (-items.tokens[item], item)):
        fitting = [row for row in range(rows) if room[row] >= items.tokens[item]]
        if not fitting:
            return None
        row = min(fitting, key=room.__getitem__)
        found[row].append(item)
        room[row] -= items.tokens[item]
    return found


def _fitting(items: Items, rows: list[Row]) -> list[Row] | None:
    """Move items out of rows with too many tokens, the shortest that suffices to the row with the most room."""
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


def _exchanged(items: Items, rows: list[Row]) -> list[Row]:
    """Move or exchange items between the row with the most work and others while that makes the two more even."""
    work = [items.work_of(row) for row in rows]
    room = [items.capacity - items.tokens_of(row) for row in rows]
    mean = sum(work) / len(rows)
    for _ in range(4 * sum(map(len, rows))):
        most = max(range(len(rows)), key=work.__getitem__)
        if work[most] <= mean * _BALANCED:
            break
        for other in heapq.nsmallest(_PARTNERS, (row for row in range(len(rows)) if row != most), key=work.__getitem__):
            pair, difference = (rows[most], rows[other]), work[most] - work[other]
            exchange = _best_exchange(items, pair, difference, room[most], room[other])
            if exchange is not None:
                given, taken = exchange
                _move(items, given, (rows[most], rows[other]), work, room, (most, other))
                _move(items, taken, (rows[other], rows[most]), work, room, (other, most))
                break
        else:
            break
    return rows


def _best_exchange(
    items: Items, rows: tuple[Row, Row], difference: float, room: int, other_room: int
) -> tuple[int | None, int | None] | None:
    """The items that the first row gives and takes so that the two rows differ least; ``None`` to leave them."""
    best, least = None, difference * (1 - 1e-9)
    for given in rows[0]:
        for taken in (None, *rows[1]):
            moved = items.work[given] - (0.0 if taken is None else items.work[taken])
            tokens = items.tokens[given] - (0 if taken is None else items.tokens[taken])
            if abs(difference - 2 * moved) < least and tokens <= other_room and -tokens <= room:
                best, least = (given, taken), abs(difference - 2 * moved)
    return best


def _move(
    items: Items,
    item: int | None,
    rows: tuple[Row, Row],
    work: list[float],
    room: list[int],
    indices: tuple[int, int],
) -> None:
    if item is None:
        return
    rows[0].remove(item)
    rows[1].append(item)
    for index, sign in zip(indices, (-1, 1), strict=True):
        work[index] += sign * items.work[item]
        room[index] -= sign * items.tokens[item]
