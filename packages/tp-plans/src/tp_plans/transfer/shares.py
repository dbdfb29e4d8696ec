"""Share work out among ranks so that their loads become equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

#: A rank, and the half-open range ``first`` to ``last`` of equal items that it takes.
Share = tuple[int, int, int]


def share_out(items: Sequence[tuple[int, int]], ranks: Sequence[int], load: defaultdict[int, int]) -> list[list[Share]]:
    """Share items out, each so many bytes and there so many times, and add each rank's bytes to its load."""
    # They lie one after another on a line of bytes, of which each rank has an interval: it takes the items whose middle
    # is there.
    quotas = _quotas([load[rank] for rank in ranks], sum(nbytes * count for nbytes, count in items))
    stops = list(accumulate(quotas))
    found: list[list[Share]] = []
    start = place = 0
    for nbytes, count in items:
        shares: list[Share] = []
        first = 0
        while first < count:
            before_stop = -(-(2 * (stops[place] - start) - nbytes) // (2 * nbytes))  # items with their middle before it
            last = min(count, max(first, before_stop))
            if last > first:
                shares.append((ranks[place], first, last))
                load[ranks[place]] += nbytes * (last - first)
            place += last < count
            first = last
        start += nbytes * count
        found.append(shares)
    return found


def _quotas(loads: Sequence[int], nbytes: int) -> list[int]:
    """Split bytes so that the loads become as equal as they can."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    total = count = 0
    for count, place in enumerate(order, start=1):
        total += loads[place]
        if count == len(order) or loads[order[count]] * count - total >= nbytes:
            break
    level, rest = divmod(total + nbytes, count)
    quotas = [0] * len(loads)
    for number, place in enumerate(order[:count]):
        quotas[place] = level + (number < rest) - loads[place]
    return quotas
