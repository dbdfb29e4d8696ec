"""Replay the steps of a training run on the caching allocator, from the first one on.

The first step decides much: the optimizer makes its state at its end, in memory that activations have left, and so
splits blocks that the second step would need whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_runtime.dry_run.allocator.caching import (
    AllocatorSettings,
    CachingAllocator,
    MemoryBlock,
    OutOfDeviceMemoryError,
)
from fsdp_runtime.dry_run.allocator.expand import TapeMismatchError, TapeStep, expand, sizes_by_category
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
    return _Replay(steps, _Added(tape, smaller, groups), CachingAllocator(settings), on_host).run(
        micro_batches, workspaces
    )


class _Added:
    """The storages outside of blocks' code that a model with more groups has: parameters, state, temporaries."""

    def __init__(self, tape: Tape, smaller: Tape | None, groups: int) -> None:
        self._before: dict[str, list[int]] = {}
        self._in_phase: dict[tuple[str, str], list[int]] = {}
        if smaller is None or not groups:
            return
        few, many = sizes_by_category(smaller), sizes_by_category(tape)
        self._before = {name: _times(many[name], few.get(name, []), groups) for name in many}
        few_in_phase, many_in_phase = _sizes_by_phase(smaller), _sizes_by_phase(tape)
        for key, sizes in many_in_phase.items():
            self._in_phase[key] = _times(sizes, few_in_phase.get(key, []), groups)

    def before(self, category: str) -> list[int]:
        """Return the bytes of more storages of a category that exist before the step."""
        return self._before.get(category, [])

    def in_phase(self, phase: str) -> list[int]:
        """Return the bytes of more storages that a phase without blocks allocates."""
        return [size for (each, _), sizes in self._in_phase.items() if each == phase for size in sizes]


def _times(many: Iterable[int], few: Iterable[int], groups: int) -> list[int]:
    return list((Counter(many) - Counter(few)).elements()) * groups


def _sizes_by_phase(tape: Tape) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for entry in tape.entries:
        if entry.delta > 0 and entry.region is not None and entry.region.phase in ("clip", "optimizer"):
            found.setdefault((entry.region.phase, entry.operator), []).append(entry.delta)
    return found


class _Replay:
    """A run of several steps."""

    def __init__(
        self, steps: Sequence[TapeStep], added: _Added, allocator: CachingAllocator, on_host: Sequence[str]
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
            more = [self._allocator.allocate(size) for size in self._added.in_phase(phase)]
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
            self._kept += [self._allocator.allocate(size) for size in (*sizes, *self._added.before("gradients"))]

    def _permanent(self, categories: Sequence[str]) -> None:
        sizes = [step.delta for step in self._initial if step.category in categories]
        for category in categories:
            if category not in self._on_host:
                sizes += self._added.before(category)
        for size in sizes:
            self._allocator.allocate(size)

    def _apply(self, step: TapeStep) -> None:
        block = self._live.pop(step.storage, None)
        if block is not None:
            self._allocator.free(block)
        if step.delta > 0:
            self._live[step.storage] = self._allocator.allocate(step.delta, _STREAMS[step.stream])
