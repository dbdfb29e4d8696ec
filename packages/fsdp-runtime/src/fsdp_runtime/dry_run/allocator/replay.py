"""Replay the steps of a training run on the caching allocator, from the first one on.

The first step decides much: the optimizer makes its state at its end, in memory that activations have left, and so
splits blocks that the second step would need whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_runtime.dry_run.allocator.caching import (
    AllocatorSettings,
    CachingAllocator,
    MemoryBlock,
    OutOfDeviceMemoryError,
)
from fsdp_runtime.dry_run.allocator.expand import TapeMismatchError, TapeStep, expand
from fsdp_runtime.dry_run.scale.repeated_blocks import RepeatedBlocks
from fsdp_runtime.dry_run.scale.summary import Tape

_STREAMS = {"compute": 0, "gather": 1, "reduce": 2}
_PERSISTENT = ("parameters", "buffers")
_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """What the allocator holds in a step, after earlier ones."""

    allocated: int  # most bytes of blocks in use
    reserved: int  # most bytes of segments
    released: int = 0  # number of times that cached memory was given back to make room
    fits: bool = True  # whether all steps ran within the allocator's ``device_memory``


def replay(
    tape: Tape,
    settings: AllocatorSettings,
    *,
    smaller: Tape | None = None,
    repeated: RepeatedBlocks | None = None,
    micro_batches: int = 1,
    workspaces: int = 0,
    on_host: Sequence[str] = (),
) -> Reserved | None:
    """Return what the allocator reserves for the steps of a tape; ``None`` if its blocks do not allocate alike."""
    # ``smaller`` is the tape of a trace with one group of blocks less. ``workspaces`` are bytes that libraries allocate
    # for good, ``on_host`` categories that are not on the device.
    try:
        steps = [step for step in expand(tape, repeated) if step.category not in on_host]
    except TapeMismatchError:
        return None
    groups = 0 if repeated is None else repeated.count - repeated.min_count - 1
    added = _added_sizes(tape, smaller, groups) if smaller is not None and groups else {}
    return _Replay(steps, added, CachingAllocator(settings), on_host).run(micro_batches, workspaces)


def _added_sizes(tape: Tape, smaller: Tape, groups: int) -> dict[str, list[int]]:
    """Return the bytes of what a model with more groups allocates outside of blocks' code, as :func:`_sizes` has it."""
    few, many = _sizes(smaller), _sizes(tape)
    found: dict[str, list[int]] = defaultdict(list)
    for (where, operator), sizes in many.items():
        found[where] += list((sizes - few[where, operator]).elements()) * groups
    return found


def _sizes(tape: Tape) -> dict[tuple[str, str], Counter[int]]:
    """Return the bytes of storages before the step by category, and of phases without blocks by phase and operator."""
    found: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for entry in tape.entries:
        if entry.delta > 0 and entry.region is None:
            found[tape.categories[entry.storage], ""][entry.delta] += 1
        elif entry.delta > 0 and entry.phase in ("clip", "optimizer"):
            found[entry.phase, entry.operator][entry.delta] += 1
    return found


class _Replay:
    """A run of several steps."""

    def __init__(
        self,
        steps: Sequence[TapeStep],
        added: Mapping[str, Sequence[int]],  # by category, and by phase without blocks
        allocator: CachingAllocator,
        on_host: Sequence[str],
    ) -> None:
        self._initial = [step for step in steps if not step.phase]
        self._steps = [step for step in steps if step.phase]
        self._added, self._allocator, self._on_host = added, allocator, on_host
        self._live: dict[object, MemoryBlock] = {}
        self._kept: list[MemoryBlock] = []

    def run(self, micro_batches: int, workspaces: int) -> Reserved:
        allocator, fits = self._allocator, True
        try:
            self._permanent(_PERSISTENT)
            if workspaces:
                allocator.allocate(workspaces)
            for number in range(_STEPS):
                allocator.reset_peaks()
                self._step(micro_batches, first=number == 0)
        except OutOfDeviceMemoryError:
            fits = False
        return Reserved(
            allocated=allocator.peak_allocated,
            reserved=allocator.peak_reserved,
            released=allocator.released,
            fits=fits,
        )

    def _step(self, micro_batches: int, *, first: bool) -> None:
        for number in range(micro_batches):
            self._pass(keeps_gradients=number < micro_batches - 1 and number == 0)
        if first:
            self._permanent(("optimizer_state",))
        for phase in ("clip", "optimizer"):
            more = [self._allocator.allocate(size) for size in self._added.get(phase, ())]
            for step in self._steps:
                if step.phase == phase:
                    self._apply(step)
            for block in more:
                self._allocator.free(block)
        for block in (*self._live.values(), *self._kept):
            self._allocator.free(block)
        self._live.clear()
        self._kept.clear()

    def _pass(self, *, keeps_gradients: bool) -> None:
        """Run forward and backward; the first of several keeps the reduced gradients."""
        for step in self._initial:
            if step.category == "inputs":
                self._apply(step)
        kept = False
        for step in self._steps:
            if step.phase in ("clip", "optimizer"):
                continue
            if keeps_gradients and step.stream == "reduce" and step.delta < 0:
                if (block := self._live.pop(step.storage, None)) is not None:
                    self._kept.append(block)
                    kept = True
                continue
            self._apply(step)
        if keeps_gradients and not kept:
            sizes = [step.delta for step in self._initial if step.category == "gradients"]
            self._kept += [self._allocator.allocate(size) for size in (*sizes, *self._added.get("gradients", ()))]

    def _permanent(self, categories: Sequence[str]) -> None:
        sizes = [step.delta for step in self._initial if step.category in categories]
        for category in categories:
            if category not in self._on_host:
                sizes += self._added.get(category, ())
        for size in sizes:
            self._allocator.allocate(size)

    def _apply(self, step: TapeStep) -> None:
        block = self._live.pop(step.storage, None)
        if block is not None:
            self._allocator.free(block)
        if step.delta > 0:
            self._live[step.storage] = self._allocator.allocate(step.delta, _STREAMS[step.stream])
