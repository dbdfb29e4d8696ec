"""Tables and colours for whoever reads a command's output: colours only where a terminal shows them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tp_plans.styles import Style, style_to_dict

_COLOURS = {"error": "31", "warning": "33", "head": "1"}


def colorize(kind: str, text: str) -> str:
    """Text in the colour of its kind, where standard output is a terminal and ``NO_COLOR`` is not set."""
    colour = _COLOURS.get(kind)
    shown = colour and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return f"\x1b[{colour}m{text}\x1b[0m" if shown else text


def table(rows: Sequence[Sequence[str]], *, header: bool = True) -> list[str]:
    """Lines with the cells of each column below one another."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [colorize("head", lines[0]), *lines[1:]] if header else lines


def short_repr(style: Style) -> str:
    """A style with those fields only that say something: ``ColwiseParallel(multiple_of=head_dim)``."""
    data = style_to_dict(style)
    shown = {
        name: f"({', '.join(map(str, value))})" if isinstance(value, list) else value for name, value in data.items()
    }
    return f"{shown.pop('style')}({', '.join(f'{name}={value}' for name, value in shown.items())})"


def format_bytes(size: float) -> str:
    """A number of bytes in the unit that keeps it short: ``1.5 GB``."""
    for name in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {name}"
        size /= 1000
    return f"{size:.3g} TB"
