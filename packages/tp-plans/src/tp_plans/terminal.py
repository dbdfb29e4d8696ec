"""Tables and colours for whoever reads a command's output: colours only where a terminal shows them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_COLOURS = {"error": "31", "warning": "33", "-": "31", "+": "32", "head": "1"}


def coloured(kind: str, text: str) -> str:
    """Text in the colour of its kind, where standard output is a terminal and ``NO_COLOR`` is not set."""
    colour = _COLOURS.get(kind)
    shown = colour and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return f"\x1b[{colour}m{text}\x1b[0m" if shown else text


def table(rows: Sequence[Sequence[str]], *, header: bool = True) -> list[str]:
    """Lines with the cells of each column below one another."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [coloured("head", lines[0]), *lines[1:]] if header else lines
