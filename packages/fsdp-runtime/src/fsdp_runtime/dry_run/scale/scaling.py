"""Scale two traces that differ by one group of identical blocks to the full model.

With identical blocks, the live bytes at a point of the step are a linear function of the numbers of blocks before it,
after it, and in total.  The peaks of the same region in two traces therefore determine the full model's.  For a block
between them the function is linear in its index, hence largest at one of the ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from fsdp_runtime.dry_run.scale.repeated_blocks import RepeatedBlocks
from fsdp_runtime.dry_run.scale.summary import Key, StepRegion, Summary
from fsdp_runtime.dry_run.types import PHASES, MemoryBreakdown, Peak, Phase


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
        larger = other.by_category()
        return MemoryBreakdown(**{name: number(value, larger[name]) for name, value in one.by_category().items()})

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
