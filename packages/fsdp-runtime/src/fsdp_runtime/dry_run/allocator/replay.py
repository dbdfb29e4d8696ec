"""Replay the steps of a training run on the caching allocator, from the first step.

The first step decides much: the optimizer makes its state at its end, in memory freed by activations, and so
splits blocks that the second step would need whole.

The tape of a trace of a few blocks is extended to all blocks of the model by copies of one group in the middle, in
forward and in backward.  A storage of a group is known by its phase, operator, size and number among equals, which are
the same in every group; a free in one group of a storage of a neighbour refers to the same neighbour of every copy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, groupby

from fsdp_runtime.dry_run.allocator.caching import (
    AllocatorSettings,
    CachingAllocator,
    MemoryBlock,
    OutOfDeviceMemoryError,
)
from fsdp_runtime.dry_run.scale.repeated_blocks import RepeatedBlocks
from fsdp_runtime.dry_run.scale.summary import StepRegion, Tape, TapeEntry

#: The key of a storage in a group: phase, operator, bytes and number among equals.
Key = tuple[str, str, int, int]

_STREAMS = {"compute": 0, "gather": 1, "reduce": 2}
_UPDATE = ("clip", "optimizer")  # phases without blocks
_STEPS = 3


class TapeMismatchError(Exception):
    """The groups of a trace allocate differently: one group cannot represent the others."""


def reserved_bytes(
    tape: Tape,
    settings: AllocatorSettings,
    *,
    available: int | None,
    smaller: Tape | None,
    repeated: RepeatedBlocks | None,
    micro_batches: int,
    on_host: Collection[str],
) -> int | None:
    """Return the most bytes that the allocator reserves in a step; ``None`` if the tape's blocks allocate differently.

    The allocator releases cached blocks if the device lacks memory: ``available`` bytes, ``None`` for any
    number.  ``smaller`` is the tape of a trace with one fewer group of blocks.  ``on_host`` are categories that are not
    on the device.
    """
    try:
        expanded = tape if repeated is None else _Expansion(tape, repeated).entries()
    except TapeMismatchError:
        return None
    entries = [entry for entry in expanded if entry.category not in on_host]
    groups = 0 if repeated is None else repeated.count - repeated.min_count - 1
    added = _added_sizes(tape, smaller, groups) if smaller is not None and groups else {}
    added = {where: sizes for where, sizes in added.items() if where not in on_host}
    limited = [] if available is None else [replace(settings, device_memory=available)]
    for each in (*limited, settings):
        allocator = CachingAllocator(each)
        with suppress(OutOfDeviceMemoryError):
            _Replay(entries, added, allocator).run(micro_batches)
            break
    return allocator.peak_reserved


def _added_sizes(tape: Tape, smaller: Tape, groups: int) -> dict[str, list[int]]:
    """Return the sizes that a model with more groups allocates outside of blocks' code, as :func:`_sizes` does."""
    few, many = _sizes(smaller), _sizes(tape)
    added: dict[str, list[int]] = defaultdict(list)
    for (where, operator), sizes in many.items():
        if where not in _UPDATE or _most(tape, where) > _most(smaller, where):  # else freed after each parameter
            added[where] += list((sizes - few[where, operator]).elements()) * groups
    return added


def _most(tape: Tape, phase: str) -> int:
    """Return the most bytes that a phase adds to the bytes at its start."""
    return max(accumulate((entry.delta for entry in tape if entry.phase == phase), initial=0))


def _sizes(tape: Tape) -> dict[tuple[str, str], Counter[int]]:
    """Return the bytes of storages before the step by category, and of phases without blocks by phase and operator."""
    sizes: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for entry in tape:
        if entry.delta > 0 and entry.region is None:
            sizes[entry.category, ""][entry.delta] += 1
        elif entry.delta > 0 and entry.phase in _UPDATE:
            sizes[entry.phase, entry.operator][entry.delta] += 1
    return sizes


class _Replay:
    def __init__(
        self,
        entries: Sequence[TapeEntry],
        added: Mapping[str, Sequence[int]],  # by category, and by phase without blocks
        allocator: CachingAllocator,
    ) -> None:
        self._entries: dict[str, list[TapeEntry]] = defaultdict(list)  # by phase without blocks, others under "pass"
        for entry in entries:
            self._entries[entry.phase if entry.phase in ("", *_UPDATE) else "pass"].append(entry)
        self._added, self._allocator = added, allocator
        self._workspaces = [entry.delta for entry in self._entries[""] if entry.category == "workspaces"]
        self._without_handle = {"forward", "backward"}  # threads that have not called cuBLAS
        self._live: dict[Hashable, MemoryBlock] = {}
        self._kept: list[MemoryBlock] = []

    def run(self, micro_batches: int) -> None:
        self._allocate("parameters", "buffers")
        for number in range(_STEPS):
            self._allocator.reset_peak()
            self._step(micro_batches, first=number == 0)

    def _step(self, micro_batches: int, *, first: bool) -> None:
        for number in range(micro_batches):
            self._pass(keeps_gradients=number < micro_batches - 1 and number == 0)
        if first:
            self._allocate("optimizer_state")
        for phase in _UPDATE:
            more = [self._allocator.allocate(size) for size in self._added.get(phase, ())]
            for entry in self._entries[phase]:
                self._apply(entry)
            for block in more:
                self._allocator.free(block)
        for block in (*self._live.values(), *self._kept):
            self._allocator.free(block)
        self._live.clear()
        self._kept.clear()

    def _pass(self, *, keeps_gradients: bool) -> None:
        """Run forward and backward; the first of several passes keeps the reduced gradients."""
        for entry in self._entries[""]:
            if entry.category == "inputs":
                self._apply(entry)
        for entry in self._entries["pass"]:
            if keeps_gradients and entry.stream == "reduce" and entry.delta < 0:
                if (block := self._live.pop(entry.storage, None)) is not None:
                    self._kept.append(block)
                continue
            self._apply(entry)
        if keeps_gradients and not self._kept:
            self._kept = self._allocate("gradients")

    def _allocate(self, *categories: str) -> list[MemoryBlock]:
        """Allocate the storages of all blocks that exist before the step."""
        sizes = [entry.delta for entry in self._entries[""] if entry.category in categories]
        sizes += [size for category in categories for size in self._added.get(category, ())]
        return [self._allocator.allocate(size) for size in sizes]

    def _apply(self, entry: TapeEntry) -> None:
        block = self._live.pop(entry.storage, None)
        if block is not None:
            self._allocator.free(block)
        if entry.delta > 0:
            self._live[entry.storage] = self._allocator.allocate(entry.delta, _STREAMS[entry.stream])
            # A thread's first product makes its handle. A large free block may lose the room of a tensor by it.
            if entry.phase in self._without_handle and "mm" in entry.operator and self._workspaces:
                self._without_handle.remove(entry.phase)
                self._allocator.allocate(self._workspaces.pop())


class _Expansion:
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
            entries, copies = list(run), range(self._added + 1)
            if group == self._inner:
                for copy in copies if phase in ("forward", "loss") else reversed(copies):
                    expanded += (entry._replace(storage=self._name(entry.storage, group, copy)) for entry in entries)
                continue
            for entry in entries:
                frees_all = group is None and entry.delta < 0 and self._is_copied(entry.storage)
                names = (self._name(entry.storage, group, copy) for copy in (copies if frees_all else (0,)))
                expanded += (entry._replace(storage=name) for name in names)
        return expanded

    def _is_copied(self, storage: Hashable) -> bool:
        return storage in self._places and self._places[storage][0] == self._inner

    def _name(self, storage: Hashable, group: int | None, copy: int) -> Hashable:
        """Return the name of a storage that a copy of a group refers to."""
        if storage not in self._places or group is None:
            return (storage, copy) if self._is_copied(storage) else storage
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
