"""How the boxes that ranks want of a tensor are cut by the boxes that ranks store: once for all tensors cut alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from tp_plans.errors import TransferError
from tp_plans.transfer.boxes import SHARED_BYTES, Box, cells, difference, intersection, split_box, uncovered, volume
from tp_plans.transfer.near_boxes import NearBoxes


class Wanted(NamedTuple):
    """A box that some ranks want, and the boxes that each of them stores of it already, by number."""

    box: Box
    own: tuple[int, ...]


class CutPart(NamedTuple):
    """A part of a tensor."""

    box: Box
    nbytes: int
    having: tuple[int, ...]  # numbers of the stored boxes whose ranks can send it; none where those who want it have it
    wanting: tuple[int, ...]  # numbers of the wanted boxes of which it is a part
    start: int  # bytes of all parts before it, each counted for each of its copies
    copies: int  # how often it is sent by a rank that has it


class Run(NamedTuple):
    """A part among those of the same senders or receivers: the bytes before it of one tensor, and how often it is."""

    part: int
    start: int
    copies: int


class Cut:
    """All parts of a tensor, in order."""

    def __init__(self, parts: Sequence[CutPart]) -> None:
        self.parts = parts
        last = parts[-1] if parts else None
        self.nbytes = last.start + last.nbytes * last.copies if last else 0

    @cached_property
    def sent(self) -> dict[tuple[int, ...], list[Run]]:
        """The parts by who can send them."""
        return self._runs((each.having, number, each.copies) for number, each in enumerate(self.parts) if each.having)

    @cached_property
    def relayed(self) -> dict[tuple[int, ...], list[Run]]:
        """The parts by who wants them, each once."""
        return self._runs((each.wanting, number, 1) for number, each in enumerate(self.parts) if each.having)

    @cached_property
    def sent_bytes(self) -> dict[tuple[int, ...], int]:
        """Bytes of a tensor in all runs of :attr:`sent`."""
        return {key: self._end(runs[-1]) for key, runs in self.sent.items()}

    @cached_property
    def relayed_bytes(self) -> dict[tuple[int, ...], int]:
        """Bytes of a tensor in all runs of :attr:`relayed`."""
        return {key: self._end(runs[-1]) for key, runs in self.relayed.items()}

    @cached_property
    def arriving(self) -> dict[int, tuple[int, int]]:
        """For each wanted box the bytes that arrive, and those that are there already."""
        found: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for each in self.parts:
            for wanted in each.wanting:
                found[wanted][0 if each.having else 1] += each.nbytes
        return {wanted: (arriving, kept) for wanted, (arriving, kept) in found.items()}

    @cached_property
    def of_wanted(self) -> dict[int, list[int]]:
        """The parts of each wanted box."""
        return _numbers_by_box(part.wanting for part in self.parts)

    @cached_property
    def of_stored(self) -> dict[int, list[int]]:
        """The parts that the ranks of each stored box can send."""
        return _numbers_by_box(part.having for part in self.parts)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """The place of each part in the runs of :attr:`sent` and of :attr:`relayed`."""
        sent = {run.part: run.start for runs in self.sent.values() for run in runs}
        relayed = {run.part: run.start for runs in self.relayed.values() for run in runs}
        return {part: (start, relayed[part]) for part, start in sent.items()}

    def _end(self, run: Run) -> int:
        return run.start + run.copies * self.parts[run.part].nbytes

    def _runs(self, found: Iterable[tuple[tuple[int, ...], int, int]]) -> dict[tuple[int, ...], list[Run]]:
        runs: dict[tuple[int, ...], list[Run]] = {}
        for key, part, copies in found:
            known = runs.setdefault(key, [])
            known.append(Run(part, self._end(known[-1]) if known else 0, copies))
        return runs


def cut(
    stored: Sequence[Box],
    shared: Sequence[bool],
    wanted: Sequence[Wanted],
    counts: Sequence[int],
    itemsize: int,
    *,
    relay: bool,
) -> Cut:
    """Cut the boxes that ranks want, ``counts`` ranks each, by those that ranks store, of which some are ``shared``."""
    # Parts that several ranks store are made small enough to be shared out. With ``relay`` each part is sent once,
    # whatever the number of those who want it. The text of the error is the part that nobody stores.
    near = NearBoxes(stored)
    pieces: dict[int, list[Box]] = {}
    local: list[tuple[Box, tuple[int, ...], tuple[int, ...]]] = []
    for number, each in enumerate(wanted):
        pieces[number] = [each.box]
        for own in each.own:
            parts = [part for piece in pieces[number] if (part := intersection(piece, stored[own])) is not None]
            local += [(part, (), (number,)) for part in parts]
            pieces[number] = [rest for piece in pieces[number] for rest in difference(piece, stored[own])]
    away = _relayed(stored, near, pieces) if relay else _direct(stored, near, pieces)
    found: list[tuple[Box, tuple[int, ...], tuple[int, ...]]] = []
    for box, having, wanting in away:
        is_shared = relay or any(shared[by] for by in having)
        smaller = split_box(box, max(1, SHARED_BYTES // itemsize)) if is_shared else [box]
        found += [(small, having, wanting) for small in smaller]
    found += local
    copies = [1 if relay else sum(counts[number] for number in wanting) for _, _, wanting in found]
    sizes = [volume(box) * itemsize for box, _, _ in found]
    starts = accumulate((size * count for size, count in zip(sizes, copies, strict=True)), initial=0)
    return Cut(
        [
            CutPart(box, size, having, wanting, start, count)
            for (box, having, wanting), size, start, count in zip(found, sizes, starts, copies, strict=False)
        ]
    )


def _direct(
    stored: Sequence[Box], near: NearBoxes, pieces: dict[int, list[Box]]
) -> Iterator[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    """Each piece cut by the first stored boxes that have parts of it."""
    for number, each in pieces.items():
        left = each
        for by in sorted({by for piece in each for by in near.near(piece)}):
            if not left:
                break
            remaining: list[Box] = []
            for piece in left:
                part = intersection(piece, stored[by])
                if part is None:
                    remaining.append(piece)
                    continue
                yield part, (by,), (number,)
                remaining += [] if part == piece else difference(piece, part)
            left = remaining
        _require_none(left)


def _relayed(
    stored: Sequence[Box], near: NearBoxes, pieces: dict[int, list[Box]]
) -> Iterator[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    """Pieces cut by the borders of all boxes, each part with all that have it and all that want it."""
    wanting: dict[Box, list[int]] = {}
    for number, each in pieces.items():
        for piece in each:
            wanting.setdefault(piece, []).append(number)
    distinct = list(wanting)
    among = NearBoxes(distinct)
    for piece in _apart(distinct, among):
        by_stored = {by: part for by in near.near(piece) if (part := intersection(piece, stored[by])) is not None}
        parts = _apart(list(dict.fromkeys(by_stored.values())), None)
        if sum(map(volume, parts)) != volume(piece):
            _require_none(uncovered(piece, parts))
        for part in parts:
            having = tuple(by for by, whole in by_stored.items() if intersection(whole, part) == part)
            others = (distinct[number] for number in among.near(part))
            yield part, having, tuple(n for o in others if intersection(o, part) == part for n in wanting[o])


def _apart(boxes: Sequence[Box], near: NearBoxes | None) -> Sequence[Box]:
    """Boxes cut by one another's borders; as they are where none overlap."""
    near = near or NearBoxes(boxes)
    for number, box in enumerate(boxes):
        if any(other != number and intersection(boxes[other], box) is not None for other in near.near(box)):
            return cells(boxes)
    return boxes


def _require_none(left: Sequence[Box]) -> None:
    if left:
        raise TransferError(f"{left[0]}")


def _numbers_by_box(boxes_of_parts: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for number, boxes in enumerate(boxes_of_parts):
        for box in boxes:
            found[box].append(number)
    return found
