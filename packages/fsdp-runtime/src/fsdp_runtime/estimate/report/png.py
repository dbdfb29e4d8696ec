"""The charts of a report as a PNG, drawn by matplotlib (``pip install fsdp-runtime[charts]``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_runtime.errors import BackendError
from fsdp_runtime.estimate.candidates import Sweep
from fsdp_runtime.estimate.report.charts import Chart, charts_of
from fsdp_runtime.estimate.report.format import readable_bytes
from fsdp_runtime.estimate.types import Estimate

_INCHES_A_BAR, _INCHES_AROUND = 0.3, 1.5


def write_png(found: Estimate | Sweep, path: str | Path) -> None:
    """Draw memory by category and traffic by axis, one above the other.

    Args:
        found: an estimate, or a sweep (its best candidates).
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
    heights = [_INCHES_AROUND + _INCHES_A_BAR * len(chart.bars) for chart in charts]
    figure = Figure(figsize=(11, sum(heights) or 1), layout="constrained")
    if charts:
        places = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)
        for (place,), chart in zip(places, charts, strict=True):
            _draw(place, chart)
    figure.savefig(path, dpi=130, format="png")


def _draw(place: Any, chart: Chart) -> None:
    labels = [label for label, _ in chart.bars]
    rows = range(len(labels))
    begin = [0.0] * len(labels)
    for at, part in enumerate(chart.parts):
        lengths = [sizes[at] / chart.scale for _, sizes in chart.bars]
        place.barh(rows, lengths, left=begin, color=part.light, label=part.name, edgecolor="white", linewidth=0.4)
        begin = [start + length for start, length in zip(begin, lengths, strict=True)]
    for row, (_, sizes) in enumerate(chart.bars):
        place.annotate(readable_bytes(sum(sizes)), (begin[row], row), (4, 0), textcoords="offset points", va="center")
    if chart.limit is not None:
        size, name = chart.limit
        place.axvline(size / chart.scale, color="#b3261e", linestyle="--", label=f"{name} {readable_bytes(size)}")
    place.set_yticks(rows, labels)
    place.invert_yaxis()
    place.set_xlim(0, chart.longest / chart.scale * 1.12)
    place.set_xlabel(chart.unit)
    place.set_title(chart.title, loc="left", fontsize=11)
    place.spines[["top", "right"]].set_visible(False)
    place.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
