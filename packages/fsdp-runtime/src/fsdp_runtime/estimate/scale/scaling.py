"""From a trace, or from two that differ by one group of identical blocks, to the whole model.

With blocks of one kind everything that is alive at a moment is a linear function of how many of them there are: before
that moment, after it, and in all.  So the highest moments of the same region in two traces tell that of the whole
model, and for a block between them the function is linear in its place, hence highest at one of the ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

from fsdp_runtime.estimate.scale.repeated_blocks import Repetition
from fsdp_runtime.estimate.scale.summary import High, Region, Summary
from fsdp_runtime.estimate.trace.recorder import Moment
from fsdp_runtime.estimate.types import PHASES, Bytes, Phase

Key = TypeVar("Key", bound=Hashable)


def scaled(small: Summary, large: Summary, repeated: Repetition, renamed: Callable[[str, int], str]) -> Summary:
    """The summary of the whole model.

    Args:
        small: the trace with the least number of groups of blocks.
        large: the trace with one group more.
        repeated: how blocks repeat.
        renamed: a module's path in the whole model, given that in the large trace and how many blocks the whole model
            has more before it (0 where places count from the front).
    """
    groups = repeated.times - repeated.least

    def number(one: int, other: int) -> int:
        return one + (other - one) * groups

    def size(one: Bytes, other: Bytes) -> Bytes:
        theirs = other.by_category()
        return Bytes(**{name: number(value, theirs[name]) for name, value in one.by_category().items()})

    def counter(one: Counter[Key], other: Counter[Key]) -> Counter[Key]:
        return Counter({key: number(one[key], other[key]) for key in (*one, *(k for k in other if k not in one))})

    more = repeated.blocks - large.blocks
    regions: dict[Region, High] = {}
    for mine, theirs, shift in _matched(small, large, repeated):
        high = size(small.regions[mine].nbytes, large.regions[theirs].nbytes)
        moment = large.regions[theirs].moment
        where = theirs._replace(block=theirs.block + more * shift)
        named = moment._replace(module=renamed(moment.module, more * shift))
        if where not in regions or high.total > regions[where].nbytes.total:
            regions[where] = High(high, named)
    patterns = (*small.whole, *(pattern for pattern in large.whole if pattern not in small.whole))
    none = (0, 0)
    return Summary(
        blocks=number(small.blocks, large.blocks),
        regions=regions,
        before=size(small.before, large.before),
        ends={phase: size(small.ends[phase], large.ends[phase]) for phase in small.ends},
        calls=counter(small.calls, large.calls),
        nbytes=counter(small.nbytes, large.nbytes),
        flops=number(small.flops, large.flops),
        whole={
            pattern: (
                number(small.whole.get(pattern, none)[0], large.whole.get(pattern, none)[0]),
                number(small.whole.get(pattern, none)[1], large.whole.get(pattern, none)[1]),
            )
            for pattern in patterns
        },
        assumed=tuple(dict.fromkeys((*small.assumed, *large.assumed))),
    )


def peaks(summary: Summary) -> dict[Phase, tuple[Bytes, Moment]]:
    """The highest moment of every phase that allocated."""
    found: dict[Phase, tuple[Bytes, Moment]] = {}
    for region, (nbytes, moment) in summary.regions.items():
        if region.phase not in found or nbytes.total > found[region.phase][0].total:
            found[region.phase] = (nbytes, moment)
    return {phase: found[phase] for phase in PHASES if phase in found}


def _matched(small: Summary, large: Summary, repeated: Repetition) -> Iterator[tuple[Region, Region, int]]:
    """Regions of the two traces that are the same: of the small one, of the large one, and whether from the back."""
    # The last block that repeats has other neighbours in the large trace, and so has the first, seen from the back.
    front = repeated.start + repeated.least * repeated.period - 1
    lengths = [_steps(summary.regions) for summary in (small, large)]
    for phase in PHASES:
        if phase in ("clip", "optimizer") and lengths[0].get(phase) != lengths[1].get(phase):
            yield from _highest_of(phase, small, large)
            continue
        for region in small.regions:
            if region.phase != phase:
                continue
            if region in large.regions and region.block < front:
                yield region, region, 0
            back = region._replace(block=region.block + repeated.period)
            if region.block > repeated.start and back in large.regions:
                yield region, back, 1


def _highest_of(phase: Phase, small: Summary, large: Summary) -> Iterator[tuple[Region, Region, int]]:
    """Where operators run a parameter at a time, moments do not correspond, and only the highest ones do."""
    highest = [
        max((r for r in s.regions if r.phase == phase), key=lambda r: s.regions[r].nbytes.total, default=None)
        for s in (small, large)
    ]
    if highest[0] is not None and highest[1] is not None:
        yield highest[0], highest[1], 0


def _steps(regions: Mapping[Region, High]) -> dict[Phase, int]:
    found: dict[Phase, int] = {}
    for region in regions:
        found[region.phase] = max(found.get(region.phase, 0), region.step)
    return found
