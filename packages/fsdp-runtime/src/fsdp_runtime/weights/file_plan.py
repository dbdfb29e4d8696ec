"""Assign the parts of a checkpoint's files to ranks that write or read them, and plan the exchanges between ranks.

A rank writes its own blocks without network if their bytes in the file are contiguous or in long runs.  Blocks that
interleave in the file, such as the columns of ``tp``, are exchanged by the ranks that together hold the tensor: each
rank takes rows of the tensor, and each element is sent at most once.  Replicas divide the rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from torch import Tensor

from fsdp_runtime.errors import WeightsError
from fsdp_runtime.sharded.chunks import Chunk
from fsdp_runtime.sharded.rank_boxes import BoxOwners, layout_key, stored_part
from fsdp_runtime.sharded.safetensors_io import run_length
from fsdp_runtime.weights.export import ExportedTensor
from tp_plans.transfer import Box, StoredBlock, full_box, intersection, split_box, volume

#: Runs of at least this many bytes are written to their places in the file without an exchange.
_LONG_RUN = 2**16
#: A reader skips gaps of at least this many bytes and reads through smaller ones: another read takes 0.2 to 0.4 ms of
#: a disk that reads 0.8 GB in a second, and more of a network file system.
_SKIPPED = 2**18
#: Replicas share a part of at least this many bytes each.
_SHARED = 4 * 2**20
#: The least bytes of a message for interleaved parts: with smaller messages, fewer ranks write rows.
_LEAST_MESSAGE = 2**14
#: Orders ranks so that two ranks of one host are far from each other (Knuth's multiplicative hash).
_SCATTER = 2654435761


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of an exported tensor, and the ranks that hold the block."""

    chunk: int  # the number of the exported tensor's chunk that the block is a part of
    block: StoredBlock  # its place in a rank's local tensor of the chunk's source; its rank is the first owner
    owners: tuple[int, ...]  # in order


@dataclass(frozen=True, slots=True)
class Part:
    """A box of an area, and the rank that holds the box."""

    box: Box
    rank: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Area:
    """A box of a stored tensor that one rank writes or reads, and the parts that fill the box."""

    file_rank: int
    box: Box
    parts: tuple[Part, ...]
    moves: bool = False  # any rank with a part may take it, as not all of them get an area

    @property
    def is_local(self) -> bool:
        """Whether the writer holds the full area."""
        return all(part.rank == self.file_rank for part in self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether the area is a part of one block and needs no assembly."""
        return len(self.parts) == 1


@dataclass(frozen=True, slots=True)
class WriteStep:
    """Areas that are exchanged together."""

    areas: tuple[Area, ...]  # of one exported tensor
    held: int  # the most bytes that a rank holds for them besides its tensors; 0 if each writer holds its areas already


class FilePlanner:
    """Plans tensors one after another; tensors with equal layouts are planned once."""

    # ``everyone`` are the ranks that write or read, in order; ``limit`` is the most bytes of an area that is assembled
    # from parts. With ``partial`` the pieces may cover a part of a tensor; else they hold every element once.

    def __init__(self, everyone: Sequence[int], limit: int, *, partial: bool = False) -> None:
        self._limit, self._partial = max(limit, 16), partial
        self._load: dict[int, int] = dict.fromkeys(everyone, 0)
        self._steps: dict[Hashable, tuple[tuple[WriteStep, ...], dict[int, int]]] = {}

    def plan(
        self, item: ExportedTensor, key: Hashable, pieces: Sequence[Piece], *, writer: int | None = None
    ) -> Sequence[WriteStep]:
        """Return the steps in which a tensor is written or read, equal on every rank, without communication."""
        # ``key`` is equal for tensors of one shape, dtype and equal pieces. ``writer`` is the one rank that may write
        # to the tensor's file, ``None`` if all may.
        turn = self._least_loaded(pieces)
        if (key, turn, writer) not in self._steps:
            steps = tuple(_Tensor(item, turn, writer, self._limit).steps(pieces, partial=self._partial))
            load: dict[int, int] = {}
            for area in (area for step in steps for area in step.areas if not area.moves):
                load[area.file_rank] = load.get(area.file_rank, 0) + volume(area.box) * item.dtype.itemsize
            self._steps[key, turn, writer] = steps, load
        steps, load = self._steps[key, turn, writer]
        for rank, nbytes in load.items():
            self._load[rank] += nbytes
        return [self._moved(step, item.dtype.itemsize) for step in steps]

    def _least_loaded(self, pieces: Sequence[Piece]) -> int:
        """The number of the replica that has written or read least, among all replicas or about 64 of them."""
        owners = max((piece.owners for piece in pieces), key=len, default=())
        tried = range(0, len(owners), max(len(owners) // 64, 1))
        return min(tried, key=lambda copy: (self._load[owners[copy]], copy), default=0)

    def _moved(self, step: WriteStep, itemsize: int) -> WriteStep:
        """Give each movable area to the rank that has written or read least among the ranks with a part."""
        if not any(area.moves for area in step.areas):
            return step
        areas, taken = [], dict[int, int]()
        for area in step.areas:
            if area.moves:
                ranks = {part.rank for part in area.parts}
                rank = min(ranks, key=lambda rank: (taken.get(rank, 0), self._load[rank], rank * _SCATTER % 2**32))
                area = _taken_by(area, rank)
                nbytes = volume(area.box) * itemsize
                taken[rank] = taken.get(rank, 0) + nbytes
                self._load[rank] += nbytes
            areas.append(area)
        return WriteStep(tuple(areas), _most_held(areas, itemsize))


class ExportedPieces:
    """The pieces of exported tensors in the shards of a model on the given ranks, in order."""

    def __init__(self, everyone: Sequence[int]) -> None:
        self._owners = {gathered: BoxOwners(everyone if gathered else everyone[:1]) for gathered in (False, True)}
        self._found: dict[Hashable, tuple[Piece, ...]] = {}

    def __call__(
        self, item: ExportedTensor, sources: Mapping[str, Tensor], *, gathered: bool = False
    ) -> tuple[Hashable, tuple[Piece, ...]]:
        """Return the pieces of a tensor with chunks of ``sources``, and a key that is the same for equal pieces."""
        # ``gathered``: every rank holds the plain tensors of ``sources`` with the same values; else the first rank's
        # copy of a plain tensor counts.
        chunks = tuple(item.chunks or ())
        layouts = tuple((chunk_key(chunk), layout_key(sources[chunk.source])) for chunk in chunks)
        key = item.shape, item.dtype, gathered, layouts
        if key not in self._found:
            self._found[key] = tuple(
                Piece(number, block, owners)
                for number, chunk in enumerate(chunks)
                for held, owners in self._owners[gathered].near(sources[chunk.source], chunk.source_box)
                for block in stored_part(chunk, owners[0], held)
            )
        return key, self._found[key]


def chunk_key(chunk: Chunk) -> Hashable:
    """Key of a chunk: equal if the places in source and target are equal."""
    return chunk.target, chunk.start, chunk.dims


class _Tensor:
    """Plans one tensor."""

    def __init__(self, item: ExportedTensor, turn: int, writer: int | None, limit: int) -> None:
        self._item, self._writer = item, writer
        self._turn = turn  # the number of the replica that writes or reads next
        self._itemsize = item.dtype.itemsize
        self._limit = max(limit // self._itemsize, 1)

    def steps(self, pieces: Sequence[Piece], *, partial: bool) -> Iterator[WriteStep]:
        """Yield the steps; areas without an exchange come first."""
        full = full_box(self._item.shape)
        found = sum(volume(piece.block.box) for piece in pieces)
        if found != volume(full) and not partial:
            raise WeightsError(
                f"{self._item.name} has {volume(full)} elements and the ranks' blocks of it have {found}: the model's "
                "shards have to hold every element exactly once"
            )
        local: list[Area] = []
        exchanged: dict[int, list[Area]] = {}
        for areas in self._areas(full, [Part(piece.block.box, piece.owners[0], piece) for piece in pieces]):
            for number, area in enumerate(areas):
                if area.is_local and area.is_whole:
                    local.append(area)
                else:
                    exchanged.setdefault(number, []).append(area)
        if local:
            yield WriteStep(tuple(local), 0)
        for _, areas in sorted(exchanged.items()):
            yield WriteStep(tuple(areas), _most_held(areas, self._itemsize))

    def _areas(self, box: Box, parts: Sequence[Part]) -> Iterator[list[Area]]:
        """Yield lists of areas that together fill a box; one rank writes the areas of a list, one after another."""
        if not parts:
            return
        if self._writer is not None:
            yield self._of_one_writer(box, parts)
            return
        if len(parts) == 1 and (parts[0].box == box or self._in_long_runs(parts)):
            yield from self._shared_out(parts[0])
            return
        dim = _first_long(box)
        cuts = sorted({border for part in parts for border in part.box[dim]})
        if len(cuts) > 2 or (cuts[0], cuts[1]) != box[dim]:
            for (low, high), inside in zip(pairwise(cuts), _cut(parts, dim, cuts), strict=True):
                yield from self._areas((*box[:dim], (low, high), *box[dim + 1 :]), inside)
        elif self._in_long_runs(parts):
            for part in parts:
                yield from self._shared_out(part)
        elif (needed := self._without_gaps(box, parts)) != [box]:
            for small in needed:
                yield from self._areas(small, list(_clipped(parts, small)))
        else:
            yield from self._interleaved(box, parts)

    def _without_gaps(self, box: Box, parts: Sequence[Part]) -> list[Box]:
        """Cut long gaps between the parts from a box, along the first dim that no single part fills."""
        dim = next((dim for dim, side in enumerate(box) if any(part.box[dim] != side for part in parts)), None)
        if dim is None:
            return [box]
        skipped = _SKIPPED / (prod(self._item.shape[dim + 1 :]) * self._itemsize)
        (first, last), *others = sorted({part.box[dim] for part in parts})
        sides = [(first, last)]
        for start, stop in others:
            first, last = sides[-1]
            if start - last < skipped:
                sides[-1] = (first, max(last, stop))
            else:
                sides.append((start, stop))
        if len(sides) == 1 and self._item.shape[dim] - (sides[0][1] - sides[0][0]) < skipped:
            return [box]
        return [(*box[:dim], side, *box[dim + 1 :]) for side in sides]

    def _in_long_runs(self, parts: Sequence[Part]) -> bool:
        return all(run_length(part.box, self._item.shape) * self._itemsize >= _LONG_RUN for part in parts)

    def _shared_out(self, part: Part) -> Iterator[list[Area]]:
        """Divide a box in long runs among the ranks that hold the box."""
        owners = part.piece.owners
        for box in self._equal_rows(part.box, min(len(owners), self._bytes(part.box) // _SHARED)):
            rank = owners[self._next_turn() % len(owners)]
            yield [Area(rank, box, (Part(box, rank, part.piece),))]

    def _interleaved(self, box: Box, parts: Sequence[Part]) -> Iterator[list[Area]]:
        """Divide a box of interleaved parts: each rank with a part writes some rows of all parts."""
        copies = max(len(part.piece.owners) for part in parts)
        used = max(min(copies, self._bytes(box) // _SHARED), 1)
        slots = []
        for copy in (self._next_turn() for _ in range(used)):
            senders = [part.piece.owners[copy % len(part.piece.owners)] for part in parts]
            slots += [(rank, senders) for rank in dict.fromkeys(senders)]
        most = sum(self._bytes(part.box) for part in parts) // (len(parts) * _LEAST_MESSAGE)
        rows = self._equal_rows(box, max(min(len(slots), most), 1))
        moves, rest = len(rows) < len(slots), _first_long(box) + 1  # every part spans all earlier dims
        for (writer, senders), own in zip(slots, rows, strict=False):
            areas = []
            for small in split_box(own, self._limit):
                inside = [
                    Part((*small[:rest], *common), writer if writer in part.piece.owners else sender, part.piece)
                    for part, sender in zip(parts, senders, strict=True)
                    if (common := intersection(part.box[rest:], small[rest:])) is not None
                ]
                areas.append(Area(writer, small, tuple(inside), moves))
            yield areas

    def _of_one_writer(self, box: Box, parts: Sequence[Part]) -> list[Area]:
        """Give a box to one writer, whichever ranks hold its parts."""
        writer, turn = self._writer or 0, self._next_turn()
        areas = []
        for small in split_box(box, self._limit):
            inside = []
            for each in _clipped(parts, small):
                owners = each.piece.owners
                inside.append(Part(each.box, writer if writer in owners else owners[turn % len(owners)], each.piece))
            areas.append(Area(writer, small, tuple(inside)))
        return areas

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn - 1

    def _bytes(self, box: Box) -> int:
        return volume(box) * self._itemsize

    def _equal_rows(self, box: Box, count: int) -> list[Box]:
        """Cut a box along its first dim that is longer than 1 into at most ``count`` boxes of about equal size."""
        if not box:
            return [box]
        dim = _first_long(box)
        start, stop = box[dim]
        count = max(min(count, stop - start), 1)
        borders = [start + (stop - start) * number // count for number in range(count + 1)]
        return [(*box[:dim], (low, high), *box[dim + 1 :]) for low, high in pairwise(borders)]


def _first_long(box: Box) -> int:
    """The first dim of a box that is longer than 1; the last dim if no dim is longer."""
    return next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), len(box) - 1)


def _cut(parts: Sequence[Part], dim: int, cuts: Sequence[int]) -> list[list[Part]]:
    """The parts between each two neighbours in ``cuts``, the borders of all parts in a dim."""
    number = {cut: number for number, cut in enumerate(cuts)}
    found: list[list[Part]] = [[] for _ in cuts[1:]]
    for part in parts:
        first, last = (number[border] for border in part.box[dim])
        if last == first + 1:
            found[first].append(part)
            continue
        for each in range(first, last):
            side = cuts[each], cuts[each + 1]
            found[each].append(Part((*part.box[:dim], side, *part.box[dim + 1 :]), part.rank, part.piece))
    return found


def _clipped(parts: Sequence[Part], box: Box) -> Iterator[Part]:
    for part in parts:
        if (common := intersection(part.box, box)) is not None:
            yield Part(common, part.rank, part.piece)


def _taken_by(area: Area, rank: int) -> Area:
    """The area with ``rank`` as its writer or reader; the rank supplies each part that it owns."""
    parts = [Part(part.box, rank, part.piece) if rank in part.piece.owners else part for part in area.parts]
    return replace(area, file_rank=rank, parts=tuple(parts))


def _most_held(areas: Sequence[Area], itemsize: int) -> int:
    held: dict[int, int] = {}
    for area in areas:
        held[area.file_rank] = held.get(area.file_rank, 0) + volume(area.box) * itemsize
        for part in area.parts:
            if part.rank != area.file_rank:
                for rank in (part.rank, area.file_rank):
                    held[rank] = held.get(rank, 0) + volume(part.box) * itemsize
    return max(held.values(), default=0)
