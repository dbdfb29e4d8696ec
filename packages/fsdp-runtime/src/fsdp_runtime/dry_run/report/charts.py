"""The charts of a report: stacked bars as data, for any renderer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle

from fsdp_runtime.dry_run.report.format import binary_scale, format_bytes
from fsdp_runtime.dry_run.report.sections import CATEGORY_NAMES
from fsdp_runtime.dry_run.sweep_types import Sweep
from fsdp_runtime.dry_run.traffic_totals import bytes_sent_by_axis, totals_by_axis
from fsdp_runtime.dry_run.types import Estimate, MemoryBreakdown

#: Number of candidates of a sweep that are drawn, best first.
MAX_BARS = 24

#: Colours of the categories of memory, on light and on dark backgrounds.
_CATEGORIES = (
    ("#2f6db5", "#5b9be6"),
    ("#7b55b0", "#a98be0"),
    ("#d97f26", "#f0a35a"),
    ("#7d858f", "#98a1ac"),
    ("#8fbbe8", "#3d6a9c"),
    ("#3c9a5c", "#5cc081"),
    ("#c63f50", "#ec7381"),
    ("#38a3b0", "#58c4d1"),
    ("#e0b93a", "#d9bc55"),
)
#: Colours of axes and collectives, none of which is a category's.
_TRAFFIC = (
    ("#1b4965", "#7fb3d1"),
    ("#bc4b51", "#e58a8e"),
    ("#5b8e7d", "#8cc5b1"),
    ("#f4a259", "#f7bc85"),
    ("#8e6c8a", "#bf9dbb"),
    ("#a3b18a", "#c3d0ab"),
    ("#6d4c41", "#a98274"),
)
_AXES = ("dp_shard", "dp_replicate", "tp", "cp", "dp_shard_cp", "dp", "dp_cp")


@dataclass(frozen=True, kw_only=True)
class ChartPart:
    """One part of the bars.

    Args:
        name: label in the legend.
        light: colour on a light background.
        dark: colour on a dark background.
    """

    name: str
    light: str
    dark: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Stacked bars of bytes.

    Args:
        title: the title.
        parts: parts in stacking order.
        bars: label and bytes of each part.
        unit: unit of the scale, such as ``"GiB"``.
        scale: bytes per unit.
        limit: bytes at which a line is drawn, and its label.
    """

    title: str
    parts: tuple[ChartPart, ...]
    bars: tuple[tuple[str, tuple[int, ...]], ...]
    unit: str
    scale: int
    limit: tuple[int, str] | None = None

    def label_of(self, size: int) -> str:
        """Return a bar's bytes in the unit of the scale."""
        return format_bytes(size, self.unit)

    @property
    def longest(self) -> int:
        """Upper end of the scale in bytes."""
        return max(max((sum(sizes) for _, sizes in self.bars), default=0), self.limit[0] if self.limit else 0, 1)


def charts_of(found: Estimate | Sweep) -> list[Chart]:
    """Return charts of memory by category and traffic by axis, per point of a step or per candidate of a sweep."""
    return _charts_of_sweep(found) if isinstance(found, Sweep) else _charts_of_estimate(found)


def ticks(chart: Chart) -> list[float]:
    """Return round values of the scale from zero to the chart's longest bar, in its unit."""
    longest = chart.longest / chart.scale
    step = next(
        size * factor
        for size in (10.0**power for power in range(-9, 30))
        for factor in (1, 2, 5)
        if longest / (size * factor) <= 7
    )
    return [step * count for count in range(int(longest / step) + 1)]


def _charts_of_estimate(estimate: Estimate) -> list[Chart]:
    memory = estimate.memory
    points = [
        ("between steps", memory.resident),
        ("after forward", memory.after_forward),
        ("after backward", memory.after_backward),
        *((f"peak in {peak.phase}", peak.nbytes) for peak in memory.phases),
    ]
    totals = totals_by_axis(estimate.traffic)
    kinds = list(dict.fromkeys(total.kind for total in totals))
    bars = {total.axis: dict.fromkeys(kinds, 0) for total in totals}
    for total in totals:
        bars[total.axis][total.kind] += total.bytes_sent
    traffic = _chart("Bytes that a rank sends per step, by axis", _with_colours(kinds, _TRAFFIC), bars.items())
    return [_memory_chart("Memory of a rank over a step", points, estimate), *([traffic] if bars else [])]


def _charts_of_sweep(sweep: Sweep) -> list[Chart]:
    drawn = [
        (f"{position}: {candidate.label}", candidate, candidate.estimate)
        for position, candidate in enumerate(sweep.estimated[:MAX_BARS], start=1)
        if candidate.estimate is not None
    ]
    if not drawn:
        return []
    peaks = [(label, estimate.memory.peak.nbytes) for label, _, estimate in drawn]
    sent = [
        (label, {axis: round(size * 1e6 / each.tokens) for axis, size in bytes_sent_by_axis(estimate.traffic).items()})
        for label, each, estimate in drawn
    ]
    seen = dict.fromkeys(axis for _, sizes in sent for axis in sizes)
    axes = _with_colours([*filter(seen.__contains__, _AXES), *(axis for axis in seen if axis not in _AXES)], _TRAFFIC)
    every = len(sweep.estimated)
    shown = f" (the best {len(drawn)} of {every} candidates)" if len(drawn) < every else ""
    return [
        _memory_chart(f"Memory of a rank at its peak{shown}", peaks, drawn[0][2]),
        _chart(f"Bytes that a rank sends per million tokens, by axis{shown}", axes, sent),
    ]


def _memory_chart(title: str, points: Iterable[tuple[str, MemoryBreakdown]], estimate: Estimate) -> Chart:
    categories = dict(zip(CATEGORY_NAMES, _with_colours(CATEGORY_NAMES.values(), _CATEGORIES).values(), strict=True))
    device = estimate.device_memory
    limit = None if device is None else (device, "device memory")
    return _chart(title, categories, [(label, nbytes.by_category()) for label, nbytes in points], limit)


def _chart(
    title: str,
    parts: Mapping[str, ChartPart],
    bars: Iterable[tuple[str, Mapping[str, int]]],
    limit: tuple[int, str] | None = None,
) -> Chart:
    """Return a chart without the parts that are empty in every bar."""
    found = list(bars)
    used = [key for key in parts if any(sizes.get(key) for _, sizes in found)]
    longest = max([limit[0] if limit else 1, *(sum(sizes.values()) for _, sizes in found)])
    unit, scale = binary_scale(longest)
    return Chart(
        title=title,
        parts=tuple(parts[key] for key in used),
        bars=tuple((label, tuple(sizes.get(key, 0) for key in used)) for label, sizes in found),
        unit=unit,
        scale=scale,
        limit=limit,
    )


def _with_colours(names: Iterable[str], colours: Iterable[tuple[str, str]]) -> dict[str, ChartPart]:
    """Return chart parts with the colours in turn."""
    pairs = zip(names, cycle(colours), strict=False)
    return {name: ChartPart(name=name, light=light, dark=dark) for name, (light, dark) in pairs}
