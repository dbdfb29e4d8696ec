"""Summarize a recording by quantities that grow with the number of blocks, and scale two summaries to all blocks.

With identical blocks, the live bytes at a point of the step are a linear function of the numbers of blocks before it,
after it, and in total.  The peaks of the same region in two traces therefore determine the full model's.  For a block
between them the function is linear in its index, hence largest at one of the ends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from fsdp_runtime.dry_run.scale.repeated_blocks import RepeatedBlocks
from fsdp_runtime.dry_run.trace.recorder import OpEvent, Recording, StorageInfo, Stream, with_fused_storages
from fsdp_runtime.dry_run.types import PHASES, Assumption, MemoryBreakdown, Peak, Phase, plus
from fsdp_runtime.mesh.collectives import CollectiveCall
from tp_plans.model_tree import is_at_or_below

Key = TypeVar("Key", bound=Hashable)
#: Phase, kind of collective, and global ranks of its group.
CallKey = tuple[Phase, str, tuple[int, ...]]


class StepRegion(NamedTuple):
    """A part of a step throughout which the same number of blocks have run."""

    phase: Phase
    block: int  # index of the last block that was entered, -1 before the first
    inside: bool  # whether that block is still running; else the code after it
    step: int = 0  # in phases without blocks the number of the operator, else 0


class TapeEntry(NamedTuple):
    """One allocation (``delta > 0``) or free."""

    storage: Hashable  # its number in the trace; copies of repeated blocks have other names
    delta: int  # bytes
    region: StepRegion | None  # where the operator ran; ``None`` before the step
    operator: str  # its name
    stream: Stream  # the stream that allocates
    category: str  # the storage's category

    @property
    def phase(self) -> str:
        """The phase; ``""`` before the step."""
        return "" if self.region is None else self.region.phase


#: The allocations and frees of a step in order.
Tape = Sequence[TapeEntry]


@dataclass(frozen=True)
class Summary:
    """Summary of one trace."""

    blocks: int  # number of the decoder's blocks that ran
    regions: dict[StepRegion, Peak]  # peak of each region
    before: MemoryBreakdown  # live bytes before the step
    ends: dict[Phase, MemoryBreakdown]  # live bytes at the end of each phase
    traffic: Mapping[CallKey, tuple[int, ...]]  # number of collectives, bytes of inputs, and bytes sent at least
    tape: Tape  # to replay it on an allocator; in a sum of traces the larger one's
    flops: Mapping[str, int]  # floating-point operations by kind
    bytes_moved: int  # bytes that operators without any read and write in forward and backward
    replicated: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # number and bytes by name pattern
    on_host: int = 0  # most bytes of activations on the host
    assumptions: tuple[Assumption, ...] = ()  # of results that depend on data, and of modules that were left out
    untrained: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # the same for parameters without gradients


def summarize(recording: Recording, blocks: Sequence[str], vocabulary: set[int]) -> Summary:
    """Return the summary of a recording."""
    # ``vocabulary`` has its full and local size: tensors outside blocks with such a last dim are logits.
    recording = with_fused_storages(recording)
    categories = storage_categories(recording, blocks, vocabulary)
    regions = regions_of(recording.events, blocks)
    peaks, before, ends = _replay(recording, categories, regions)
    operators = (event.operator for event in recording.events)
    places = [*zip(regions, operators, strict=True), (None, "")]  # the last is event -1, before the step
    kinds = [*zip((info.stream for info in recording.storages), categories, strict=True)]
    assumptions = (replace(each, module=wildcard(each.module)) for each in recording.assumptions)
    return Summary(
        blocks=len(blocks),
        regions=peaks,
        before=before,
        ends=ends,
        traffic=traffic_of(recording.collectives),
        flops=recording.flops,
        bytes_moved=recording.bytes_moved,
        assumptions=tuple(dict.fromkeys(assumptions)),
        tape=[
            TapeEntry(each.storage, each.delta, *places[each.event], *kinds[each.storage])
            for each in recording.allocations
            if each.delta
        ],
    )


def traffic_of(calls: Iterable[tuple[Phase, CollectiveCall]]) -> dict[CallKey, tuple[int, ...]]:
    """Return number, bytes of inputs and bytes sent of calls by phase, kind and ranks."""
    return add_up(((phase, call.kind, call.ranks), (1, call.nbytes, call.bytes_sent)) for phase, call in calls)


def add_up(items: Iterable[tuple[Key, tuple[int, ...]]]) -> dict[Key, tuple[int, ...]]:
    """Return the sums of tuples of numbers by key."""
    totals: dict[Key, tuple[int, ...]] = {}
    for key, numbers in items:
        before = totals.get(key, (0,) * len(numbers))
        totals[key] = tuple(one + other for one, other in zip(before, numbers, strict=True))
    return totals


def wildcard(path: str) -> str:
    """Return a path with every number as ``*``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def storage_categories(recording: Recording, blocks: Sequence[str], vocabulary: set[int]) -> list[str]:
    """Return the category of every storage: the registered category, else by its shape and lifetime."""

    def category(info: StorageInfo) -> str:
        if info.category is not None:
            return info.category
        event = recording.events[info.created_at]
        if info.last_dim in vocabulary and _block_of(event.module, blocks) is None and event.phase != "optimizer":
            return "logits"
        if event.phase in ("forward", "loss") and info.outlives_forward:
            return "activations"
        return "temporaries"

    return [category(info) for info in recording.storages]


def _replay(
    recording: Recording, categories: Sequence[str], regions: Sequence[StepRegion]
) -> tuple[dict[StepRegion, Peak], MemoryBreakdown, dict[Phase, MemoryBreakdown]]:
    """Replay the allocations; return the regions' peaks, the bytes before the step and at the end of each phase."""
    live: Counter[str] = Counter()
    total = begin = 0
    highest: dict[StepRegion, tuple[int, dict[str, int], OpEvent]] = {}
    at_end: dict[Phase, MemoryBreakdown] = {}
    before = MemoryBreakdown()
    for phase, end in recording.ends.items():
        for allocation in recording.allocations[begin:end]:
            if allocation.event >= 0 and before.total == 0:
                before = MemoryBreakdown(**live)
            live[categories[allocation.storage]] += allocation.delta
            total += allocation.delta
            if allocation.event < 0 or allocation.delta < 0:
                continue
            region = regions[allocation.event]
            if region not in highest or total > highest[region][0]:
                highest[region] = (total, dict(live), recording.events[allocation.event])
        at_end[phase], begin = MemoryBreakdown(**live), end
    of_regions = {
        region: Peak(phase=event.phase, module=event.module, operator=event.operator, nbytes=MemoryBreakdown(**parts))
        for region, (_, parts, event) in highest.items()
    }
    return of_regions, before, at_end


def regions_of(events: Sequence[OpEvent], blocks: Sequence[str]) -> list[StepRegion]:
    """Return the region of every event."""
    regions: list[StepRegion] = []
    phase, last, step = None, -1, 0
    for event in events:
        if event.phase != phase:
            phase, last, step = event.phase, -1, 0
        if event.phase in ("clip", "optimizer"):
            regions.append(StepRegion(event.phase, -1, False, step))
            step += 1
            continue
        block = _block_of(event.module, blocks)
        last = last if block is None else block
        regions.append(StepRegion(event.phase, last, block is not None))
    return regions


def _block_of(module: str, blocks: Sequence[str]) -> int | None:
    return next((index for index, path in enumerate(blocks) if is_at_or_below(module, path)), None)


def scale_up(
    small: Summary, large: Summary, repeated: RepeatedBlocks, shift_block: Callable[[str, int], str]
) -> Summary:
    """Return the full model's summary from the summaries of two traces that differ by one group of blocks."""
    # ``shift_block`` returns a module's path in the full model from its path in the large trace and the number of
    # blocks that the full model has in addition before it (0 for blocks counted from the front).
    groups = repeated.count - repeated.min_count

    def number(one: int, other: int) -> int:
        return one + (other - one) * groups

    def breakdown(one: MemoryBreakdown, other: MemoryBreakdown) -> MemoryBreakdown:
        return plus(one, plus(other, one, -1), groups)

    def counts(one: Mapping[Key, tuple[int, ...]], other: Mapping[Key, tuple[int, ...]]) -> dict[Key, tuple[int, ...]]:
        none = (0, 0, 0)
        keys = dict.fromkeys((*one, *other))
        return {key: tuple(map(number, one.get(key, none), other.get(key, none))) for key in keys}

    added = repeated.blocks - large.blocks
    regions: dict[StepRegion, Peak] = {}
    for in_small, in_large, from_back in _matching_regions(small, large, repeated):
        peak = large.regions[in_large]
        nbytes = breakdown(small.regions[in_small].nbytes, peak.nbytes)
        region = in_large._replace(block=in_large.block + added * from_back)
        if region not in regions or nbytes.total > regions[region].total:
            regions[region] = replace(peak, nbytes=nbytes, module=shift_block(peak.module, added * from_back))

    return Summary(
        blocks=number(small.blocks, large.blocks),
        regions=regions,
        before=breakdown(small.before, large.before),
        ends={phase: breakdown(small.ends[phase], large.ends[phase]) for phase in small.ends},
        traffic=counts(small.traffic, large.traffic),
        tape=large.tape,
        flops={kind: number(small.flops.get(kind, 0), large.flops[kind]) for kind in large.flops},
        bytes_moved=number(small.bytes_moved, large.bytes_moved),
        replicated=counts(small.replicated, large.replicated),
        on_host=number(small.on_host, large.on_host),
        untrained=counts(small.untrained, large.untrained),
        assumptions=tuple(dict.fromkeys((*small.assumptions, *large.assumptions))),
    )


def peaks(summary: Summary) -> tuple[Peak, ...]:
    """Return the peak of every phase with allocations, in the order of the step."""
    highest: dict[Phase, Peak] = {}
    for peak in summary.regions.values():
        if peak.phase not in highest or peak.total > highest[peak.phase].total:
            highest[peak.phase] = peak
    return tuple(highest[phase] for phase in PHASES if phase in highest)


def _matching_regions(
    small: Summary, large: Summary, repeated: RepeatedBlocks
) -> Iterator[tuple[StepRegion, StepRegion, int]]:
    """Yield equal regions of the two traces, with 1 if the region's block is counted from the back, else 0."""
    # The last repeated block has other neighbours in the large trace, and so has the first, counted from the back.
    first = repeated.start + repeated.margin
    front = repeated.start + repeated.min_count * repeated.period - 1 - repeated.margin
    lengths = [_operator_counts(summary.regions) for summary in (small, large)]
    for phase in PHASES:
        if phase in ("clip", "optimizer") and lengths[0].get(phase) != lengths[1].get(phase):
            yield from _highest_regions(phase, small, large)
            continue
        for region in small.regions:
            if region.phase != phase:
                continue
            if region in large.regions and region.block < front:
                yield region, region, 0
            back = region._replace(block=region.block + repeated.period)
            if region.block > first and back in large.regions:
                yield region, back, 1


def _highest_regions(phase: Phase, small: Summary, large: Summary) -> Iterator[tuple[StepRegion, StepRegion, int]]:
    """Yield only the highest regions of a phase: its operators run once per parameter, so regions do not correspond."""
    highest = [
        max((r for r in s.regions if r.phase == phase), key=lambda r: s.regions[r].total, default=None)
        for s in (small, large)
    ]
    if highest[0] is not None and highest[1] is not None:
        yield highest[0], highest[1], 0


def _operator_counts(regions: Mapping[StepRegion, Peak]) -> dict[Phase, int]:
    counts: dict[Phase, int] = {}
    for region in regions:
        counts[region.phase] = max(counts.get(region.phase, 0), region.step)
    return counts
