"""The allocations of a recording after compilation: without fused or recomputed results."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from fsdp_runtime.dry_run.trace.fusion import FusedStorage
from fsdp_runtime.dry_run.trace.recorder import AllocationEvent, Recording


def with_fused_storages(recording: Recording) -> Recording:
    """Return a recording in which compiled modules allocate only materialized results; see ``fusion``."""
    if all(info.fused is None for info in recording.storages):
        return recording
    moved = _freed_at(recording)
    for index, position in moved.items():
        recording.storages[index].outlives_forward = position >= recording.ends["forward"]
    kept: list[tuple[float, AllocationEvent]] = []
    for position, allocation in enumerate(recording.allocations):
        fused = recording.storages[allocation.storage].fused
        if fused is not None and not fused.materialized:
            continue
        at = moved.get(allocation.storage, float(position)) if allocation.delta < 0 else float(position)
        kept.append((at, allocation))
    kept.sort(key=lambda each: each[0])
    positions = [position for position, _ in kept]
    ends = {phase: bisect_left(positions, end) for phase, end in recording.ends.items()}
    events = [allocation.event for allocation in recording.allocations]
    allocations = [
        each if each.delta > 0 else each._replace(event=events[min(int(position), len(events) - 1)])
        for position, each in kept
    ]
    laps = [lap._replace(allocations=bisect_left(positions, lap.allocations)) for lap in recording.laps]
    return replace(recording, allocations=allocations, ends=ends, laps=laps)


def _freed_at(recording: Recording) -> dict[int, float]:
    """Return new free positions of storages that compiled modules free earlier, or later, than the trace."""
    # FSDP2 resizes gathered parameters: these are allocated more than once, and stay as they are.
    times = Counter(each.storage for each in recording.allocations if each.delta > 0)
    freed = {
        each.storage: position
        for position, each in enumerate(recording.allocations)
        if each.delta < 0 and times[each.storage] == 1
    }
    positions: dict[int, float] = {}
    later: dict[int, float] = {}
    for info in recording.storages:
        fused = info.fused
        if fused is None or fused.index not in freed or not fused.recomputed or not fused.read_elsewhere:
            continue
        positions[fused.index] = fused.last_read + 0.5
        for source in _sources(fused):
            later[source.index] = max(later.get(source.index, 0.0), freed[fused.index] + 0.5)
    for index, position in later.items():
        if index in freed and position > positions.get(index, freed[index]):
            positions[index] = position
    return positions


def _sources(fused: FusedStorage) -> Iterator[FusedStorage]:
    """Yield the storages from which a value is computed again."""
    waiting, seen = list(fused.sources), set[int]()
    while waiting:
        source = waiting.pop()
        if source.index in seen:
            continue
        seen.add(source.index)
        if source.recomputed:
            waiting += source.sources
        else:
            yield source
