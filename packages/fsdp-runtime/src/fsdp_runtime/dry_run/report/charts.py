"""The charts of a report, stacked bars of bytes, drawn with matplotlib (``pip install fsdp-runtime[charts]``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from fsdp_runtime.dry_run.report.format import binary_scale, format_bytes
from fsdp_runtime.dry_run.report.sections import points_of, sizes_by_name
from fsdp_runtime.dry_run.sweep_types import Sweep
from fsdp_runtime.dry_run.types import Estimate, Memory, bytes_sent_by_axis, totals_by_axis
from fsdp_runtime.errors import BackendError

#: Number of candidates of a sweep that are drawn, best first.
MAX_BARS = 24

#: matplotlib's colours of the categories of memory, and of axes and collectives; no colour is in both.
_MEMORY, _TRAFFIC = "tab10", "Dark2"
#: The part of a bar that no live tensor fills.
_BESIDES = "allocator, context, NCCL"
_INCHES_PER_BAR, _INCHES_MARGIN = 0.3, 1.5


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Stacked bars of bytes."""

    title: str
    bars: tuple[tuple[str, Mapping[str, int]], ...]  # label, and bytes by the name of the part in stacking order
    colours: str  # name of matplotlib's colour map of the parts
    limit: int | None = None  # bytes of the device memory, at which a line is drawn

    @property
    def parts(self) -> list[str]:
        """The names of the parts that are not empty in every bar."""
        return [part for part in self.bars[0][1] if any(sizes[part] for _, sizes in self.bars)]

    @property
    def longest(self) -> int:
        """Upper end of the scale in bytes."""
        return max(self.limit or 1, *(sum(sizes.values()) for _, sizes in self.bars))


def chart_picture(result: Estimate | Sweep, kind: str) -> bytes:
    """Return an image (``"png"`` or ``"svg"``) of memory by category and traffic by axis."""
    # Per point of a step, or per candidate of a sweep, the best ones.
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError("charts need matplotlib: pip install 'fsdp-runtime[charts]'") from error
    charts = charts_of(result)
    heights = [_INCHES_MARGIN + _INCHES_PER_BAR * len(chart.bars) for chart in charts]
    image = BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # labels as text
        figure = Figure(figsize=(11, sum(heights) or 1), layout="constrained")
        if charts:
            axes = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)
            for (axis,), chart in zip(axes, charts, strict=True):
                _draw(axis, chart)
        figure.savefig(image, dpi=130, format=kind)
    return image.getvalue()


def charts_of(result: Estimate | Sweep) -> list[Chart]:
    """Return the charts of an estimate or of a sweep, as data."""
    if isinstance(result, Sweep):
        return _charts_of_sweep(result)
    memory = result.memory
    points = points_of(memory) | {f"peak in {peak.phase}": peak.nbytes for peak in memory.phases}
    bars = {label: {**sizes_by_name(nbytes), _BESIDES: 0} for label, nbytes in points.items()}
    sent: dict[str, dict[str, int]] = {}
    for total in totals_by_axis(result.traffic):
        sent.setdefault(total.axis, {})[total.kind] = total.bytes_sent
    return [
        _memory_chart("Memory of a rank over a step", bars | {"device memory": _taken(memory)}, result),
        *_traffic_chart("Bytes that a rank sends per step, by axis", sent),
    ]


def _charts_of_sweep(sweep: Sweep) -> list[Chart]:
    taken, sent = dict[str, dict[str, int]](), dict[str, dict[str, int]]()
    for position, candidate in enumerate(sweep.estimated[:MAX_BARS], start=1):
        if (estimate := candidate.estimate) is not None:
            label, traffic = f"{position}: {candidate.label}", bytes_sent_by_axis(estimate.traffic)
            taken[label] = _taken(estimate.memory)
            sent[label] = {axis: round(size * 1e6 / candidate.tokens) for axis, size in traffic.items()}
    if not taken:
        return []
    every = len(sweep.estimated)
    shown = f" (the best {len(taken)} of {every} candidates)" if len(taken) < every else ""
    return [
        _memory_chart(f"Device memory of a rank{shown}", taken, sweep.estimated[0].estimate),
        *_traffic_chart(f"Bytes that a rank sends per million tokens, by axis{shown}", sent),
    ]


def _taken(memory: Memory) -> dict[str, int]:
    """Return the bytes of the peak by category, and the bytes that the process takes besides."""
    return {**sizes_by_name(memory.peak.nbytes), _BESIDES: memory.device - memory.peak.total}


def _memory_chart(title: str, bars: Mapping[str, Mapping[str, int]], estimate: Estimate | None) -> Chart:
    limit = None if estimate is None else estimate.device_memory
    return Chart(title=title, bars=tuple(bars.items()), colours=_MEMORY, limit=limit)


def _traffic_chart(title: str, sent: Mapping[str, Mapping[str, int]]) -> list[Chart]:
    parts = list(dict.fromkeys(part for sizes in sent.values() for part in sizes))
    filled = tuple((label, {part: sizes.get(part, 0) for part in parts}) for label, sizes in sent.items())
    return [Chart(title=title, bars=filled, colours=_TRAFFIC)] if parts else []


def _draw(axis: Any, chart: Chart) -> None:
    from matplotlib import colormaps

    unit, scale = binary_scale(chart.longest)
    rows, parts = range(len(chart.bars)), chart.parts
    colours = colormaps[chart.colours]
    begin = [0.0] * len(chart.bars)
    for index, part in enumerate(parts):
        lengths = [sizes[part] / scale for _, sizes in chart.bars]
        colour = colours(index % colours.N)
        axis.barh(rows, lengths, left=begin, color=colour, label=part, edgecolor="white", linewidth=0.4)
        begin = [start + length for start, length in zip(begin, lengths, strict=True)]
    for row, (_, sizes) in enumerate(chart.bars):
        text = format_bytes(sum(sizes.values()), unit)
        axis.annotate(text, (begin[row], row), (4, 0), textcoords="offset points", va="center")
    if chart.limit is not None:
        label = f"device memory {format_bytes(chart.limit)}"
        axis.axvline(chart.limit / scale, color="black", linestyle="--", label=label)
    axis.set_yticks(rows, [label for label, _ in chart.bars])
    axis.invert_yaxis()
    axis.set_xlim(0, chart.longest / scale * 1.12)
    axis.set_xlabel(unit)
    axis.set_title(chart.title, loc="left", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
