"""Assign the parts of a checkpoint's files to ranks that read them, with the ranks that receive the parts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from fsdp_runtime.sharded.chunks import Chunk, local_part
from fsdp_runtime.sharded.rank_boxes import BoxOwners, layout_key
from fsdp_runtime.weights.export import ExportedTensor
from fsdp_runtime.weights.file_plan import Area, FilePlanner, Part, Piece, chunk_key
from fsdp_runtime.weights.hub_checkpoint import HubTensor
from tp_plans.transfer import Box, StoredBlock, split_box, volume


@dataclass(frozen=True)
class Read:
    """An area of a stored tensor, and this rank's local tensors that take its parts."""

    item: ExportedTensor
    stored: HubTensor
    area: Area
    local: Mapping[int, Tensor]  # this rank's tensors, by the number of the part's piece
    readers: tuple[int, ...]  # the area's reader, or all on one host: its page cache serves all but the first

    @property
    def nbytes(self) -> int:
        """Bytes of the area in the file."""
        return volume(self.area.box) * self.item.dtype.itemsize

    def receivers(self, part: Part) -> Iterator[int]:
        """The ranks that receive a part."""
        return (rank for rank in part.piece.owners if rank not in self.readers)

    @property
    def is_sent(self) -> bool:
        """Whether a rank that does not read the area needs a part."""
        return any(True for part in self.area.parts for _ in self.receivers(part))

    def held(self) -> dict[int, int]:
        """The bytes that each rank holds for the area until the exchange is done."""
        if not self.is_sent:
            return {}
        held = {self.area.file_rank: self.nbytes}
        for part in self.area.parts:
            for rank in self.receivers(part):
                for each in (self.area.file_rank, rank):
                    held[each] = held.get(each, 0) + volume(part.box) * self.item.dtype.itemsize
        return held


@dataclass
class _Stored:
    """A stored tensor, and the chunks of the model's tensors that it fills."""

    item: ExportedTensor
    stored: HubTensor
    fills: list[tuple[Chunk, Tensor]] = field(default_factory=list)


class _FilledPieces:
    """The pieces of stored tensors that fill the model's tensors on the reading ranks."""

    def __init__(self, readers: Sequence[int]) -> None:
        self._owners, self._readers = BoxOwners(readers), set(readers)
        self._found: dict[Hashable, list[Piece]] = {}

    def __call__(self, key: Hashable, fills: Sequence[tuple[Chunk, Tensor]]) -> list[Piece]:
        """Return the pieces of a stored tensor, by the numbers of ``fills``; equal pieces share a key."""
        if key not in self._found:
            self._found[key] = [
                Piece(number, block, near)
                for number, (chunk, tensor) in enumerate(fills)
                for held, owners in self._owners.near(tensor, chunk.target)
                if (near := tuple(rank for rank in owners if rank in self._readers))
                and (block := _filled_block(chunk, near[0], held)) is not None
            ]
        return self._found[key]


def plan_reads(
    filled: Sequence[tuple[Tensor, Sequence[Chunk]]],
    stored: Mapping[str, HubTensor],
    readers: Sequence[int],
    bucket_bytes: int,
    *,
    one_host: bool,
) -> list[list[Read]]:
    """Return batches of reads in the order of the files; the reads of a batch are exchanged together."""
    # Equal on all of ``readers``, without communication. Each byte is read by one rank, if any rank needs the byte. On
    # one host, ranks that need the same long run of bytes all read the run, at about the same time: a copy from the
    # page cache is several times faster than a message.
    planner, pieces_of = FilePlanner(readers, bucket_bytes // 4, partial=True), _FilledPieces(readers)
    own = {id(tensor): local_part(tensor)[0].detach() for tensor, _ in filled}
    batches: list[list[Read]] = [[]]
    held: dict[int, int] = {}
    for each in _by_place(filled, stored):
        keys = tuple((chunk_key(chunk), layout_key(tensor)) for chunk, tensor in each.fills)
        steps = planner.plan(each.item, (each.item.shape, each.item.dtype, keys), pieces_of(keys, each.fills))
        local = {number: own[id(tensor)] for number, (_, tensor) in enumerate(each.fills)}
        for read in _bounded((area for step in steps for area in step.areas), each, local, bucket_bytes // 4, one_host):
            needed = read.held()
            if any(held.get(rank, 0) + nbytes > bucket_bytes for rank, nbytes in needed.items()):
                batches.append([])
                held = {}
            for rank, nbytes in needed.items():
                held[rank] = held.get(rank, 0) + nbytes
            batches[-1].append(read)
    return batches


def _by_place(filled: Sequence[tuple[Tensor, Sequence[Chunk]]], stored: Mapping[str, HubTensor]) -> list[_Stored]:
    """The stored tensors that the model needs, in the order of the files."""
    found: dict[str, _Stored] = {}
    for tensor, chunks in filled:
        for chunk in chunks:
            name, given = chunk.source, stored[chunk.source]
            found.setdefault(name, _Stored(ExportedTensor(name, given.torch_dtype, given.shape, None), given))
            found[name].fills.append((chunk, tensor))
    return sorted(found.values(), key=lambda each: (each.stored.file, each.stored.start))


def _filled_block(chunk: Chunk, rank: int, held: Box) -> StoredBlock | None:
    """The box of the stored tensor that fills the part ``held`` of a model's tensor, and its place in the part."""
    inside = chunk.intersect(held)
    if inside is None:
        return None
    box = inside.source_box
    offset = tuple(low - start for (low, _), (start, _) in zip(inside.target, held, strict=True))
    dims = tuple(chunk.dims.index(dim) if dim in chunk.dims else None for dim in range(len(box)))
    return StoredBlock(rank, box, "model", offset, dims)


def _bounded(
    areas: Iterator[Area], each: _Stored, local: Mapping[int, Tensor], limit: int, one_host: bool
) -> Iterator[Read]:
    """The reads of areas; areas for other ranks are cut to at most ``limit`` bytes."""
    for area in areas:
        (part, *more) = area.parts
        readers = part.piece.owners if one_host and not more else (area.file_rank,)
        read = Read(each.item, each.stored, area, local, readers)
        if more or not read.is_sent:
            yield read
            continue
        for box in split_box(area.box, max(limit // each.item.dtype.itemsize, 1)):
            yield replace(read, area=Area(area.file_rank, box, (Part(box, part.rank, part.piece),)))
