"""Extend the tape of a trace of a few blocks to all blocks of the model, by copies of one group of repeated blocks.

The parts of the tape that belong to one group in the middle, in forward and in backward, are repeated.  A storage of a
group is known by its phase, operator, size and number among equals, which are the same in every group; a free in one
group of a storage of a neighbour refers to the same neighbour of every copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import groupby

from fsdp_runtime.dry_run.scale.repeated_blocks import RepeatedBlocks
from fsdp_runtime.dry_run.scale.summary import StepRegion, Tape, TapeEntry

#: The key of a storage in a group: phase, operator, bytes and number among equals.
Key = tuple[str, str, int, int]


class TapeMismatchError(Exception):
    """The groups of a trace allocate differently: one group cannot represent the others."""


def expand(tape: Tape, repeated: RepeatedBlocks | None) -> Tape:
    """Return the full model's tape from the tape of the larger of two traces; unchanged if the trace ran all blocks."""
    return tape if repeated is None else _Expansion(tape, repeated).entries()


class _Expansion:
    """Copies of an inner group of a trace."""

    def __init__(self, tape: Tape, repeated: RepeatedBlocks) -> None:
        self._tape = tape
        self._repeated = repeated
        self._inner = repeated.inner
        self._added = repeated.count - repeated.min_count - 1
        self._places: dict[Hashable, tuple[int, Key]] = {}  # group and key of a storage that a group allocated
        seen: Counter[tuple[int, str, str, int]] = Counter()
        for entry in tape:
            group = self._group_of(entry.region)
            if entry.delta > 0 and group is not None and entry.storage not in self._places:
                kind = (entry.phase, entry.operator, entry.delta)
                self._places[entry.storage] = group, (*kind, seen[group, *kind])
                seen[group, *kind] += 1
        self._storages = {place: storage for storage, place in self._places.items()}

    def entries(self) -> list[TapeEntry]:
        expanded: list[TapeEntry] = []
        for (group, phase), run in groupby(self._tape, lambda each: (self._group_of(each.region), each.phase)):
            entries = list(run)
            if group != self._inner:
                expanded += self._outside(entries, group)
                continue
            copies = range(self._added + 1)
            for copy in copies if phase in ("forward", "loss") else reversed(copies):
                expanded += (entry._replace(storage=self._name(entry.storage, group, copy)) for entry in entries)
        return expanded

    def _outside(self, entries: Iterable[TapeEntry], group: int | None) -> Iterable[TapeEntry]:
        for entry in entries:
            if group is None and entry.delta < 0 and self._is_copied(entry.storage):
                for copy in range(self._added + 1):
                    yield entry._replace(storage=(entry.storage, copy))
                continue
            yield entry._replace(storage=self._name(entry.storage, group, 0))

    def _is_copied(self, storage: Hashable) -> bool:
        return storage in self._places and self._places[storage][0] == self._inner

    def _name(self, storage: Hashable, group: int | None, copy: int) -> Hashable:
        """Return the name of a storage that a copy of a group refers to."""
        if storage not in self._places or group is None:
            return (storage, 0) if self._is_copied(storage) else storage
        own, key = self._places[storage]
        position = own + (copy if group <= self._inner else self._added)
        if position < self._inner:
            target = (position, 0)
        elif position <= self._added + self._inner:
            target = (self._inner, position - self._inner)
        else:
            target = (position - self._added, 0)
        named = self._storages.get((target[0], key))
        if named is None:
            raise TapeMismatchError(f"{key} of group {own} has no counterpart in group {target[0]}")
        return (named, target[1]) if target[0] == self._inner else named

    def _group_of(self, region: StepRegion | None) -> int | None:
        """Return the number of the group of blocks that runs, ``None`` outside of them."""
        if region is None or region.block < self._repeated.start:
            return None
        if region.phase not in ("forward", "loss", "backward"):
            return None
        group = (region.block - self._repeated.start) // self._repeated.period
        last = self._repeated.min_count
        # Code after the last block belongs to no group in forward, and neither does the loss.
        is_after = not region.inside and (region.phase == "loss" or (region.phase == "forward" and group == last))
        return None if group > last or is_after else group
