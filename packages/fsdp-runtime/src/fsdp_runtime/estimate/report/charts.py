"""What the charts of a report show: bars of several parts, as data that any renderer draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice

from fsdp_runtime.estimate.candidates import Sweep
from fsdp_runtime.estimate.report.format import binary_scale
from fsdp_runtime.estimate.report.sections import CATEGORY_NAMES
from fsdp_runtime.estimate.scale.traffic_totals import by_axis, moved_by_axis
from fsdp_runtime.estimate.types import Bytes, Estimate

#: Candidates of a sweep that are drawn, the best ones.
MOST_BARS = 24

_LIGHT_AND_DARK = (
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
_TRAFFIC = 5  # so that an axis does not look like parameters
_AXES = ("dp_shard", "dp_replicate", "tp", "cp", "dp_shard_cp", "dp", "dp_cp")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What bars consist of.

    Args:
        name: in the legend.
        light: its colour on a light ground.
        dark: its colour on a dark ground.
    """

    name: str
    light: str
    dark: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Stacked bars of bytes.

    Args:
        title: what is shown.
        parts: in the order in which they are stacked.
        bars: label and bytes of each part.
        unit: the unit of the scale, as ``"GiB"``.
        scale: bytes of that unit.
        limit: bytes at which a line is drawn, and its label.
    """

    title: str
    parts: tuple[Part, ...]
    bars: tuple[tuple[str, tuple[int, ...]], ...]
    unit: str
    scale: int
    limit: tuple[int, str] | None = None

    @property
    def longest(self) -> int:
        """Bytes that the scale has to reach."""
        return max(max((sum(sizes) for _, sizes in self.bars), default=0), self.limit[0] if self.limit else 0, 1)


def charts_of(found: Estimate | Sweep) -> list[Chart]:
    """Memory by category and traffic by axis: of each moment of a step, or of each candidate of a sweep."""
    return _charts_of_sweep(found) if isinstance(found, Sweep) else _charts_of_estimate(found)


def ticks(chart: Chart) -> list[float]:
    """Round values of the scale from zero to the chart's longest bar, in its unit."""
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
    moments = [
        ("between steps", memory.held),
        ("after forward", memory.after_forward),
        ("after backward", memory.after_backward),
        *((f"most in {peak.phase}", peak.nbytes) for peak in memory.phases),
    ]
    totals = by_axis(estimate.traffic)
    kinds = list(dict.fromkeys(total.kind for total in totals))
    bars = {total.axis: dict.fromkeys(kinds, 0) for total in totals}
    for total in totals:
        bars[total.axis][total.kind] += total.moved
    traffic = _chart("Bytes that leave a rank in a step, by axis", _numbered(kinds, _TRAFFIC), bars.items())
    return [_memory_chart("Memory of a rank over a step", moments, estimate), *([traffic] if bars else [])]


def _charts_of_sweep(sweep: Sweep) -> list[Chart]:
    drawn = [
        (f"{place}: {candidate.label}", candidate, candidate.estimate)
        for place, candidate in enumerate(sweep.estimated[:MOST_BARS], start=1)
        if candidate.estimate is not None
    ]
    if not drawn:
        return []
    peaks = [(label, estimate.memory.peak.nbytes) for label, _, estimate in drawn]
    sent = [
        (label, {axis: round(size * 1e6 / way.tokens) for axis, size in moved_by_axis(estimate.traffic).items()})
        for label, way, estimate in drawn
    ]
    seen = dict.fromkeys(axis for _, sizes in sent for axis in sizes)
    axes = _numbered([*filter(seen.__contains__, _AXES), *(axis for axis in seen if axis not in _AXES)], _TRAFFIC)
    return [
        _memory_chart("Memory of a rank at its peak", peaks, drawn[0][2]),
        _chart("Bytes that leave a rank for a million tokens of the step, by axis", axes, sent),
    ]


def _memory_chart(title: str, moments: Iterable[tuple[str, Bytes]], estimate: Estimate) -> Chart:
    categories = dict(zip(CATEGORY_NAMES, _numbered(CATEGORY_NAMES.values()).values(), strict=True))
    device = estimate.device_memory
    limit = None if device is None else (device, "device memory")
    return _chart(title, categories, [(label, nbytes.by_category()) for label, nbytes in moments], limit)


def _chart(
    title: str,
    parts: Mapping[str, Part],
    bars: Iterable[tuple[str, Mapping[str, int]]],
    limit: tuple[int, str] | None = None,
) -> Chart:
    """A chart of those parts of which some bar has any."""
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


def _numbered(names: Iterable[str], start: int = 0) -> dict[str, Part]:
    """Names with the colours from ``start`` on."""
    pairs = islice(cycle(_LIGHT_AND_DARK), start, None)
    return {name: Part(name=name, light=light, dark=dark) for name, (light, dark) in zip(names, pairs, strict=False)}
