"""Draw the charts of a report as a PNG with matplotlib (``pip install fsdp-runtime[charts]``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_runtime.dry_run.report.charts import Chart, charts_of
from fsdp_runtime.dry_run.report.format import format_bytes
from fsdp_runtime.dry_run.sweep_types import Sweep
from fsdp_runtime.dry_run.types import Estimate
from fsdp_runtime.errors import BackendError

_INCHES_PER_BAR, _INCHES_MARGIN = 0.3, 1.5


def write_png(found: Estimate | Sweep, path: str | Path) -> None:
    """Draw memory by category and traffic by axis into one image.

    Args:
        found: an estimate, or a sweep (its best candidates are drawn).
        path: the file to write.

    Raises:
        BackendError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "a PNG needs matplotlib, which is not installed: pip install 'fsdp-runtime[charts]', or write HTML"
        ) from error
    charts = charts_of(found)
    heights = [_INCHES_MARGIN + _INCHES_PER_BAR * len(chart.bars) for chart in charts]
    figure = Figure(figsize=(11, sum(heights) or 1), layout="constrained")
    if charts:
        axes = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)
        for (axis,), chart in zip(axes, charts, strict=True):
            _draw(axis, chart)
    figure.savefig(path, dpi=130, format="png")


def _draw(axis: Any, chart: Chart) -> None:
    labels = [label for label, _ in chart.bars]
    rows = range(len(labels))
    begin = [0.0] * len(labels)
    for index, part in enumerate(chart.parts):
        lengths = [sizes[index] / chart.scale for _, sizes in chart.bars]
        axis.barh(rows, lengths, left=begin, color=part.light, label=part.name, edgecolor="white", linewidth=0.4)
        begin = [start + length for start, length in zip(begin, lengths, strict=True)]
    for row, (_, sizes) in enumerate(chart.bars):
        axis.annotate(chart.label_of(sum(sizes)), (begin[row], row), (4, 0), textcoords="offset points", va="center")
    if chart.limit is not None:
        size, name = chart.limit
        axis.axvline(size / chart.scale, color="#b3261e", linestyle="--", label=f"{name} {format_bytes(size)}")
    axis.set_yticks(rows, labels)
    axis.invert_yaxis()
    axis.set_xlim(0, chart.longest / chart.scale * 1.12)
    axis.set_xlabel(chart.unit)
    axis.set_title(chart.title, loc="left", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
