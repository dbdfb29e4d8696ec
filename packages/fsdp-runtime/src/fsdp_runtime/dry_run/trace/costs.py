"""The cost of one recorded phase: bytes that it keeps, its peak, its operations and its collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp_runtime.dry_run.scale.summary import CallKey, add_up, storage_categories
from fsdp_runtime.dry_run.trace.fused_allocations import with_fused_storages
from fsdp_runtime.dry_run.trace.recorder import Lap, Recording
from fsdp_runtime.dry_run.types import MemoryBreakdown, Peak


def plus(one: MemoryBreakdown, other: MemoryBreakdown, times: int = 1) -> MemoryBreakdown:
    """Add a number of times the bytes of another breakdown; differences have negative bytes."""
    return MemoryBreakdown(**{name: n + times * getattr(other, name) for name, n in one.by_category().items()})


@dataclass(frozen=True)
class Cost:
    """The cost of an action; bytes are relative to the live bytes before it."""

    kept: MemoryBreakdown = field(default_factory=MemoryBreakdown)  # live after it; negative where it frees more
    peaks: tuple[Peak, ...] = ()  # of each phase
    flops: Mapping[str, int] = field(default_factory=dict)  # by kind
    bytes_moved: int = 0
    traffic: Mapping[CallKey, tuple[int, ...]] = field(default_factory=dict)

    def without_gathers(self) -> Cost:
        """Return the cost of an action that finds its weights gathered."""
        peaks = tuple(replace(peak, nbytes=replace(peak.nbytes, gathered=0)) for peak in self.peaks)
        traffic = {
            key: totals for key, totals in self.traffic.items() if key[1] != "all_gather" or not self.kept.gathered
        }
        return replace(self, kept=replace(self.kept, gathered=0), peaks=peaks, traffic=traffic)

    def raised(self, nbytes: MemoryBreakdown) -> Cost:
        """Return the cost of an action that first adds bytes and keeps them."""
        peaks = tuple(replace(peak, nbytes=plus(nbytes, peak.nbytes)) for peak in self.peaks)
        return replace(self, kept=plus(nbytes, self.kept), peaks=peaks)


def costs_of(
    recording: Recording, blocks: Sequence[str], vocabulary: set[int], actions: Sequence[int]
) -> tuple[MemoryBreakdown, list[Cost]]:
    """Return the live bytes before the first phase, and the cost of each action; actions are numbers of phases."""
    recording = with_fused_storages(recording)
    laps = recording.laps
    names = storage_categories(recording, blocks, vocabulary)
    live: Counter[str] = Counter()
    first = next((n for n, each in enumerate(recording.allocations) if each.event >= 0), len(recording.allocations))
    for each in recording.allocations[:first]:
        live[names[each.storage]] += each.delta
    before, costs = MemoryBreakdown(**live), list[Cost]()
    previous, position = Lap("forward", first, 0, {}, 0), 0
    for count in actions:
        start, peaks = MemoryBreakdown(**live), list[tuple[Peak, int]]()
        for lap in laps[position : position + count]:
            begin = peaks[-1][1] if peaks else previous.allocations
            peaks.append((_peak(recording, names, live, start, begin, lap), lap.allocations))
        end = laps[position + count - 1]
        costs.append(
            Cost(
                kept=plus(MemoryBreakdown(**live), start, -1),
                peaks=tuple(peak for peak, _ in peaks),
                flops={kind: n - previous.flops.get(kind, 0) for kind, n in end.flops.items()},
                bytes_moved=end.bytes_moved - previous.bytes_moved,
                traffic=add_up(
                    ((phase, call.kind, call.ranks), (1, call.nbytes, call.bytes_sent))
                    for phase, call in recording.collectives[previous.collectives : end.collectives]
                ),
            )
        )
        previous, position = end, position + count
    return before, costs


def _peak(
    recording: Recording, names: Sequence[str], live: Counter[str], start: MemoryBreakdown, begin: int, lap: Lap
) -> Peak:
    """Replay the allocations of a phase on the live bytes, and return its peak relative to ``start``."""
    total = most = sum(live.values())
    highest, event = dict(live), -1
    for each in recording.allocations[begin : lap.allocations]:
        live[names[each.storage]] += each.delta
        total += each.delta
        if total > most:
            most, highest, event = total, dict(live), each.event
    module, operator = recording.events[event][1:] if event >= 0 else ("", "")
    return Peak(phase=lap.phase, module=module, operator=operator, nbytes=plus(MemoryBreakdown(**highest), start, -1))
