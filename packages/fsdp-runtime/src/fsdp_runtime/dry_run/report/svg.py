"""Draw stacked bars as inline SVG; the page's style selects light or dark colours."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fsdp_runtime.dry_run.report.charts import Chart, ticks
from fsdp_runtime.dry_run.report.format import format_bytes

_WIDTH, _BAR, _GAP, _TOP, _BOTTOM, _VALUE = 960, 20, 10, 26, 24, 86
_LETTER = 6.7


def svg_of(chart: Chart) -> str:
    """Return a chart as one ``<svg>`` element; each part has its bytes as a tooltip."""
    left = min(round(max((len(label) for label, _ in chart.bars), default=0) * _LETTER) + 12, _WIDTH // 2)
    height = _TOP + len(chart.bars) * (_BAR + _GAP) + _BOTTOM
    per_byte = (_WIDTH - left - _VALUE) / chart.longest
    lines = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">',
        *_grid(chart, left, per_byte, height - _BOTTOM),
        *_bars(chart, left, per_byte),
        *_limit(chart, left, per_byte, height - _BOTTOM),
        "</svg>",
    ]
    return "\n".join(lines)


def legend_of(chart: Chart) -> str:
    """Return the legend of a chart as an HTML list."""
    items = (f'<li><i style="{colours(part.light, part.dark)}"></i>{escape(part.name)}</li>' for part in chart.parts)
    return f'<ul class="legend">{"".join(items)}</ul>'


def colours(light: str, dark: str) -> str:
    """Return a style with both colours; the page's style uses one of them."""
    return f"--light:{light};--dark:{dark}"


def _grid(chart: Chart, left: float, per_byte: float, bottom: int) -> Iterator[str]:
    for value in ticks(chart):
        x = left + value * chart.scale * per_byte
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}">{value:g}</text>'
    yield f'<text class="unit" x="{_WIDTH - 4}" y="{bottom + 16}">{chart.unit}</text>'


def _bars(chart: Chart, left: float, per_byte: float) -> Iterator[str]:
    for row, (label, sizes) in enumerate(chart.bars):
        y = _TOP + row * (_BAR + _GAP)
        yield f'<text class="label" x="{left - 8}" y="{y + 14}">{escape(label)}</text>'
        x = float(left)
        for part, size in zip(chart.parts, sizes, strict=True):
            width = size * per_byte
            if width > 0:
                tooltip = f"<title>{escape(f'{label}: {part.name} {format_bytes(size)}')}</title>"
                style = colours(part.light, part.dark)
                geometry = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"'
                yield f'<rect class="part" style="{style}" {geometry}>{tooltip}</rect>'
            x += width
        yield f'<text class="value" x="{x + 6:.1f}" y="{y + 14}">{chart.label_of(sum(sizes))}</text>'


def _limit(chart: Chart, left: float, per_byte: float, bottom: int) -> Iterator[str]:
    if chart.limit is not None:
        size, name = chart.limit
        x = left + size * per_byte
        yield f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>'
        yield f'<text class="limit-name" x="{x:.1f}" y="{_TOP - 12}">{escape(name)} {format_bytes(size)}</text>'
