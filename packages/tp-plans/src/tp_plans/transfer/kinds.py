"""Kinds of tensors: equal cuts on the same ranks, as in repeated layers, are planned once."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from tp_plans.boxes import Box, cells, split_box, volume
from tp_plans.errors import TransferError
from tp_plans.transfer.layout import CheckpointTensor, TransferLayout
from tp_plans.transfer.patterns import Pattern

#: Boxes that several ranks can send are shared out in parts of at most this many bytes.
SHARED_BYTES = 4 * 2**20

Ranks = tuple[int, ...]
#: A rank, and the half-open range ``first`` to ``last`` of equal items that it takes.
Share = tuple[int, int, int]
#: The parts of a tensor that are wanted, each with the numbers of the boxes that are stored and wanted of it.
Cut = Sequence[tuple[Box, tuple[int, ...], tuple[int, ...]]]


@dataclass(slots=True)
class CutPart:
    """A box with the same holders and the same receivers in all tensors of a kind."""

    box: Box
    nbytes: int
    holders: Ranks  # that have it
    receivers: Ranks  # that want it and do not have it
    keepers: Ranks  # that want it and have it
    copies: int  # how often it leaves the source
    start: int = 0  # bytes of a tensor that leave the source before it
    senders: Sequence[Share] = ()  # shares of the copies: those for the first receiver in all tensors, then the next
    spared: Sequence[Share] = ()  # with relays, who passes on nothing: shares of the tensors


class Move(NamedTuple):
    """A part that one rank sends another, of some tensors of a kind, from number ``first`` to before ``last``."""

    source: int
    destination: int
    first: int
    last: int
    copy: int = 0  # how often the part has left the source before
    origin: int | None = None
    hop: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors of one shape and dtype with the same pattern on both sides, in the order of the checkpoint."""

    tensors: Sequence[str]
    parts: Sequence[CutPart]
    relay: bool

    @property
    def nbytes(self) -> int:
        """Bytes of one tensor that leave the source."""
        return sum(part.nbytes * part.copies for part in self.parts)

    def parts_of(self, rank: int) -> Iterator[CutPart]:
        """The parts that a rank sends, receives or keeps."""
        for part in self.parts:
            is_sender = any(sender == rank for sender, _, _ in part.senders)
            if is_sender or rank in part.receivers or rank in part.keepers:
                yield part

    def moves(self, part: CutPart) -> Iterator[Move]:
        """Yield the moves of a part: sent, passed on and kept."""
        count = len(self.tensors)
        yield from (Move(rank, rank, 0, count) for rank in part.keepers)
        for sender, first, last in part.senders:
            if self.relay:
                yield from _chains(part, sender, first, last)
                continue
            for copy in range(first // count, -(-last // count)):
                before = copy * count
                low, high = max(first - before, 0), min(last - before, count)
                yield Move(sender, part.receivers[copy], low, high, copy)


def _chains(part: CutPart, origin: int, first: int, last: int) -> Iterator[Move]:
    """Yield the moves along a chain of receivers: each passes the part on except the last, who takes turns."""
    for spared, begin, end in part.spared:
        low, high = max(first, begin), min(last, end)
        if low < high:
            place = part.receivers.index(spared) + 1
            source = origin
            for hop, rank in enumerate((*part.receivers[place:], *part.receivers[:place])):
                yield Move(source, rank, low, high, 0, origin if hop else None, hop)
                source = rank


def kinds_of(source: TransferLayout, destination: TransferLayout, *, relay: bool) -> list[Kind]:
    """The kinds of the destination's tensors; who sends their parts is open."""
    names_of_kind: dict[tuple[Pattern, Pattern, CheckpointTensor], list[str]] = defaultdict(list)
    for name, tensor in destination.tensors.items():
        names_of_kind[source.pattern(name), destination.pattern(name), tensor].append(name)
    cut = cache(_cut)  # experts on different ranks have equal cuts
    kinds = []
    for (have, want, tensor), names in names_of_kind.items():
        boxes = cut(tuple(have.owners), tuple(want.owners))
        parts = list(_parts(have, want, boxes, tensor.itemsize, relay=relay))
        if lacking := [part for part in parts if not part.holders]:
            raise TransferError(
                f"no source rank stores {lacking[0].box} of {names[0]}, which has shape {tensor.shape}: the source "
                "layout must hold every part of the tensors that it sends"
            )
        kinds.append(Kind(names, parts, relay))
    return kinds


def share_parts(kinds: Iterable[Kind]) -> tuple[dict[int, int], dict[int, int]]:
    """Choose the sender of each part, and with relays the last rank of each chain; return each rank's bytes of both."""
    sent: defaultdict[int, int] = defaultdict(int)
    spared: defaultdict[int, int] = defaultdict(int)
    for kind, ranks, parts in _alike(kinds, lambda part: part.holders):
        count = len(kind.tensors)
        shares = share_out([(part.nbytes, part.copies * count) for part in parts], ranks, sent)
        for part, shared in zip(parts, shares, strict=True):
            part.senders = shared
    for kind, ranks, parts in _alike((kind for kind in kinds if kind.relay), lambda part: part.receivers):
        shares = share_out([(part.nbytes, len(kind.tensors)) for part in parts], ranks, spared)
        for part, shared in zip(parts, shares, strict=True):
            part.spared = shared
    return sent, spared


def _alike(kinds: Iterable[Kind], ranks_of: Callable[[CutPart], Ranks]) -> list[tuple[Kind, Ranks, list[CutPart]]]:
    """Group the parts that are sent by the ranks that share them: parts of few ranks first, then large parts."""
    groups = []
    for kind in kinds:
        parts: dict[Ranks, list[CutPart]] = defaultdict(list)
        for part in kind.parts:
            if part.receivers:
                parts[ranks_of(part)].append(part)
        groups += [(kind, ranks, listed) for ranks, listed in parts.items()]
    # Later tensors can balance uneven shares of earlier ones.
    return sorted(groups, key=lambda each: (len(each[1]), -each[2][0].nbytes))


def _parts(have: Pattern, want: Pattern, cut: Cut, itemsize: int, *, relay: bool) -> Iterator[CutPart]:
    """Yield the parts of a tensor that the destination needs, in small boxes if ranks can take turns."""
    ranks_having, ranks_wanting = _union(have.owners.values()), _union(want.owners.values())
    on_both_sides = have.by_rank.keys() & want.by_rank.keys()
    start = 0
    for box, stored, asked in cut:
        holders, takers = ranks_having(stored), ranks_wanting(asked)
        have_it = on_both_sides.intersection(holders) if on_both_sides else ()
        keepers = tuple(rank for rank in takers if rank in have_it) if have_it else ()
        receivers = tuple(rank for rank in takers if rank not in have_it) if have_it else takers
        copies = min(1, len(receivers)) if relay else len(receivers)
        takes_turns = receivers and (relay or len(holders) > 1)
        for small in split_box(box, max(1, SHARED_BYTES // itemsize)) if takes_turns else [box]:
            nbytes = volume(small) * itemsize
            yield CutPart(small, nbytes, holders, receivers, keepers, copies, start)
            start += copies * nbytes


def _union(ranks_of_boxes: Iterable[Ranks]) -> Callable[[tuple[int, ...]], Ranks]:
    """A function that returns the ranks of the boxes of some numbers, in order."""
    known = list(ranks_of_boxes)

    @cache
    def joined(numbers: tuple[int, ...]) -> Ranks:
        return tuple(sorted({rank for number in numbers for rank in known[number]}))

    return lambda numbers: known[numbers[0]] if len(numbers) == 1 else joined(numbers)


def _cut(stored: Sequence[Box], asked: Sequence[Box]) -> Cut:
    cuts = []
    for box, numbers in cells([*stored, *asked]):
        place = bisect_left(numbers, len(stored))
        if place < len(numbers):
            cuts.append((box, numbers[:place], tuple(number - len(stored) for number in numbers[place:])))
    return cuts


def share_out(items: Sequence[tuple[int, int]], ranks: Sequence[int], load: defaultdict[int, int]) -> list[list[Share]]:
    """Share out items (bytes of each, and their number) among ranks, and add each rank's bytes to its load."""
    # The items lie one after another on a line of bytes. Each rank has an interval of the line and takes the items with
    # a middle in it.
    quotas = _quotas([load[rank] for rank in ranks], sum(nbytes * count for nbytes, count in items))
    stops = list(accumulate(quotas))
    shares_of_items: list[list[Share]] = []
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
        shares_of_items.append(shares)
    return shares_of_items


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
