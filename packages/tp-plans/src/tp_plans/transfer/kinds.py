"""Tensors that are cut alike and lie on the same ranks, as those of repeated layers do: planned once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from tp_plans.errors import TransferError
from tp_plans.transfer.boxes import Box, disjoint, intersection
from tp_plans.transfer.cuts import Cut, CutPart, Wanted, cut
from tp_plans.transfer.layout import CheckpointTensor, TransferLayout
from tp_plans.transfer.near_boxes import NearBoxes
from tp_plans.transfer.patterns import Pattern
from tp_plans.transfer.senders import Lines, Segment


class Move(NamedTuple):
    """A part that one rank sends another, of some tensors of a kind, from number ``first`` to before ``last``."""

    part: CutPart
    copy: int
    source: int
    destination: int
    first: int
    last: int
    origin: int | None = None
    hop: int = 0


class Kind:
    """Tensors of one shape and dtype with the same pattern on both sides, in the order of the checkpoint."""

    def __init__(
        self,
        tensors: Sequence[str],
        cut: Cut,
        holders: Sequence[tuple[int, ...]],
        receivers: Sequence[tuple[int, ...]],
        *,
        relay: bool,
    ) -> None:
        self.tensors, self.cut, self._relay = tensors, cut, relay
        self.holders, self.receivers = holders, receivers  # the ranks of each stored and of each wanted box
        self._senders: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._chains: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._lines: tuple[Lines, Lines] = Lines(), Lines()
        self._segments: dict[tuple[int, ...], Segment] = {}
        self._relayed: dict[tuple[int, ...], Segment] = {}

    def share_out(self, senders: Lines, relays: Lines, load: dict[int, int]) -> None:
        """Put what several ranks can send on their lines, and count what only one can."""
        self._lines, count = (senders, relays), len(self.tensors)
        for having, runs in self.cut.sent.items():
            ranks = self._union(self._senders, having, self.holders)
            nbytes = self.cut.sent_bytes[having]
            if len(ranks) == 1:
                load[ranks[0]] += nbytes * count
            else:
                self._segments[having] = senders.of(ranks).add(self.cut, runs, nbytes, count)
        for wanting, runs in self.cut.relayed.items() if self._relay else ():
            ranks = self._union(self._chains, wanting, self.receivers)
            self._relayed[wanting] = relays.of(ranks).add(self.cut, runs, self.cut.relayed_bytes[wanting], count)

    @cached_property
    def by_rank(self) -> Mapping[int, tuple[Sequence[int], Sequence[int]]]:
        """The stored and the wanted boxes of each rank."""
        found: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for side, boxes in enumerate((self.holders, self.receivers)):
            for number, ranks in enumerate(boxes):
                for rank in ranks:
                    found[rank][side].append(number)
        return found

    def moves(self, rank: int | None = None) -> Iterator[Move]:
        """All that is sent or kept, or what one rank has part in."""
        if rank is None:
            for number in range(len(self.cut.parts)):
                yield from self._moves_of(number)
            return
        stored, wanted = self.by_rank.get(rank, ((), ()))
        sending = {part for box in stored for part in self.cut.of_stored.get(box, ())}
        receiving = {part for box in wanted for part in self.cut.of_wanted.get(box, ())}
        for number in sorted(sending | receiving):
            only = rank if number not in sending and not self._relay else None
            for each in self._moves_of(number, only):
                if rank in (each.source, each.destination, each.origin):
                    yield each

    def _moves_of(self, number: int, destination: int | None = None) -> Iterator[Move]:
        part, count = self.cut.parts[number], len(self.tensors)
        if not part.having:
            for copy, rank in enumerate(self._union(self._chains, part.wanting, self.receivers)):
                yield Move(part, copy, rank, rank, 0, count)
            return
        receivers = self._union(self._chains, part.wanting, self.receivers)
        if self._relay:
            yield from self._chain(number, part, receivers)
            return
        for copy, rank in enumerate(receivers):
            if destination in (None, rank):
                for source, first, last in self._from(number, part, copy):
                    yield Move(part, copy, source, rank, first, last)

    def _from(self, number: int, part: CutPart, copy: int) -> Iterator[tuple[int, int, int]]:
        ranks = self._union(self._senders, part.having, self.holders)
        if len(ranks) == 1:
            yield ranks[0], 0, len(self.tensors)
            return
        start, _ = self.cut.places[number]
        yield from self._lines[0].of(ranks).senders(self._segments[part.having], start, part.nbytes, copy)

    def _chain(self, number: int, part: CutPart, receivers: tuple[int, ...]) -> Iterator[Move]:
        """Along a chain of those who want the part: each passes it on, but for the last, who takes turns."""
        _, start = self.cut.places[number]
        turns = list(self._lines[1].of(receivers).senders(self._relayed[part.wanting], start, part.nbytes, 0))
        for origin, begin, end in self._from(number, part, 0):
            for last_rank, first, last in turns:
                low, high = max(begin, first), min(end, last)
                if low >= high:
                    continue
                place = receivers.index(last_rank) + 1
                source = origin
                for hop, rank in enumerate((*receivers[place:], *receivers[:place])):
                    yield Move(part, 0, source, rank, low, high, origin if hop else None, hop)
                    source = rank

    def _union(
        self, known: dict[tuple[int, ...], tuple[int, ...]], boxes: tuple[int, ...], ranks: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """The ranks of some boxes, in order."""
        if len(boxes) == 1:
            return ranks[boxes[0]]
        if boxes not in known:
            known[boxes] = tuple(sorted({rank for box in boxes for rank in ranks[box]}))
        return known[boxes]


def kinds_of(source: TransferLayout, destination: TransferLayout, *, relay: bool) -> list[Kind]:
    """The kinds of the destination's tensors."""
    alike: dict[tuple[Pattern, Pattern, CheckpointTensor], list[str]] = {}
    for name, tensor in destination.tensors.items():
        alike.setdefault((source.pattern(name), destination.pattern(name), tensor), []).append(name)
    cuts = _Cuts(relay=relay)
    found = []
    for (have, want, tensor), names in alike.items():
        wanted = _wanted(have, want)
        try:
            shared = cuts.of(have, wanted, tensor.itemsize)
        except TransferError as error:
            raise TransferError(
                f"no source rank stores {error} of {names[0]}, which has shape {tensor.shape}: the source layout must "
                "hold every part of the tensors that it sends"
            ) from None
        found.append(Kind(names, shared, list(have.owners.values()), list(wanted.values()), relay=relay))
    return found


class _Cuts:
    """Remembers how boxes are cut, as experts are cut alike on other ranks."""

    def __init__(self, *, relay: bool) -> None:
        self._relay = relay
        self._known: dict[Hashable, Cut] = {}

    def of(self, have: Pattern, wanted: Mapping[Wanted, Sequence[int]], itemsize: int) -> Cut:
        stored, shared = tuple(have.owners), tuple(len(ranks) > 1 for ranks in have.owners.values())
        counts = tuple(len(ranks) for ranks in wanted.values())
        key = stored, shared, tuple(wanted), counts, itemsize
        if key not in self._known:
            self._known[key] = cut(stored, shared, list(wanted), counts, itemsize, relay=self._relay)
        return self._known[key]


def _wanted(have: Pattern, want: Pattern) -> dict[Wanted, tuple[int, ...]]:
    """The boxes that ranks want, which do not overlap on a rank, with what each rank has of them itself."""
    numbers = {box: number for number, box in enumerate(have.owners)}
    found: dict[Wanted, list[int]] = {}
    for box, ranks in _given(want).items():
        for rank in ranks:
            own: tuple[int, ...] = ()
            if rank in have.by_rank:
                held = list(dict.fromkeys(each.box for each in have.by_rank[rank]))
                own = tuple(
                    numbers[held[n]] for n in NearBoxes(held).near(box) if intersection(held[n], box) is not None
                )
            found.setdefault(Wanted(box, own), []).append(rank)
    return {wanted: tuple(ranks) for wanted, ranks in found.items()}


def _given(want: Pattern) -> Mapping[Box, Sequence[int]]:
    """The ranks to be given each box, so that none is given an element twice."""
    if all(len(boxes) == 1 for boxes in want.by_rank.values()):
        return want.owners
    found: dict[Box, list[int]] = {}
    for rank in sorted(want.by_rank):
        for box in disjoint(dict.fromkeys(each.box for each in want.by_rank[rank])):
            found.setdefault(box, []).append(rank)
    return found
