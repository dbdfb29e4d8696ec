"""Patterns of blocks: the storage of tensors with equal layouts, as in repeated layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tp_plans.boxes import Box, volume


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a checkpoint tensor in a local tensor of a rank."""

    rank: int  # the rank that stores it
    box: Box  # the part of the checkpoint tensor
    local: str  # the name of the rank's local tensor
    offset: tuple[int, ...]  # the index of the block's first element in the local tensor, one number per local dim
    # the local dim of each checkpoint dim, ``None`` for a dim that the local tensor lacks.  The block has size 1 in
    # local dims that are not listed, as a single expert has in a stack of experts
    dims: tuple[int | None, ...]

    def local_box(self, box: Box) -> Box:
        """Return the place of a part of the block in the local tensor."""
        ranges = [(first, first + 1) for first in self.offset]
        for (start, stop), (first, _), dim in zip(box, self.box, self.dims, strict=True):
            if dim is not None:
                ranges[dim] = (self.offset[dim] + start - first, self.offset[dim] + stop - first)
        return tuple(ranges)


class Copies(NamedTuple):
    """A block that several ranks store; ``slot`` is the index of the local tensor's name in the tensor's names."""

    ranks: tuple[int, ...]
    box: Box
    slot: int
    offset: tuple[int, ...]
    dims: tuple[int | None, ...]


class Pattern:
    """The blocks of a tensor, without its name and its local tensors' names; compared by identity."""

    def __init__(self, copies: Iterable[Copies]) -> None:
        self.copies = tuple(block for block in copies if volume(block.box))

    @cached_property
    def by_rank(self) -> Mapping[int, Sequence[Copies]]:
        """The blocks of each rank."""
        copies: dict[int, list[Copies]] = defaultdict(list)
        for block in self.copies:
            for rank in block.ranks:
                copies[rank].append(block)
        return dict(copies)

    @cached_property
    def owners(self) -> Mapping[Box, tuple[int, ...]]:
        """The ranks that store each box, in order."""
        owners: dict[Box, tuple[int, ...]] = {}
        for block in self.copies:
            known = owners.get(block.box)
            owners[block.box] = block.ranks if known is None else tuple(sorted({*known, *block.ranks}))
        return owners

    @cached_property
    def elements(self) -> Mapping[int, int]:
        """The elements that each rank stores; a copy counts again."""
        counts: dict[int, int] = defaultdict(int)
        for block in self.copies:
            count = volume(block.box)
            for rank in block.ranks:
                counts[rank] += count
        return dict(counts)

    def blocks(self, locals_: Sequence[str], rank: int | None = None) -> Iterator[StoredBlock]:
        """The blocks of a tensor with such local tensors, in the order of ranks, or one rank's blocks."""
        for number in sorted(self.by_rank) if rank is None else [rank]:
            for block in self.by_rank.get(number, ()):
                yield StoredBlock(number, block.box, locals_[block.slot], block.offset, block.dims)

    def shifted(self, by: int) -> Pattern:
        """The same with ``by`` added to every rank."""
        return Pattern(block._replace(ranks=tuple(rank + by for rank in block.ranks)) for block in self.copies)


class Placed(NamedTuple):
    """A tensor's pattern of blocks, and the names of its local tensors."""

    pattern: Pattern
    locals: tuple[str, ...]


#: No block.
NOWHERE = Placed(Pattern(()), ())


class KnownPatterns:
    """Makes one pattern of blocks that are equal but for the names of local tensors."""

    def __init__(self) -> None:
        self._known: dict[tuple[Copies, ...], Pattern] = {}

    def of(self, blocks: Iterable[StoredBlock]) -> Placed:
        """The pattern of some blocks."""
        slots: dict[str, int] = {}
        ranks: dict[tuple[Box, int, tuple[int, ...], tuple[int | None, ...]], list[int]] = {}
        for block in blocks:
            slot = slots.setdefault(block.local, len(slots))
            ranks.setdefault((block.box, slot, block.offset, block.dims), []).append(block.rank)
        copies = tuple(Copies(tuple(sorted(on)), *key) for key, on in ranks.items())
        if copies not in self._known:
            self._known[copies] = Pattern(copies)
        return Placed(self._known[copies], tuple(slots))
