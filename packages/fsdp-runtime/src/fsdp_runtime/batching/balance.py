"""Assign sequences to the micro-batches of ranks, so that the ranks finish each micro-batch together.

Ranks wait for each other in the collectives of each micro-batch, so a step's time is the sum over the micro-batches of
the largest row.  Only the rows of one micro-batch need equal work.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import chain

from fsdp_runtime.batching.partition import Items, Row, best_fit, least_rows, partitions

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
