"""Format a report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fsdp_runtime.dry_run.report.sections import Section
from tp_plans.runtime import colorize

#: Keys of the terminal colours by the status of a section.
_COLOURS = {"good": "+", "bad": "error", "": "head"}


def text_lines(sections: Iterable[Section]) -> Iterator[str]:
    """Yield the lines of a report, an empty line between sections; with colours on a terminal that supports them."""
    for index, section in enumerate(sections):
        if index:
            yield ""
        if section.rows:
            yield from _table(section)
        else:
            yield colorize(_COLOURS[section.status], section.heading)
        yield from (f"  {line}" for line in section.lines)


def aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return the lines of a table; the first ``left`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _table(section: Section) -> Iterator[str]:
    header, *lines = aligned(section.rows, left=section.left)
    yield colorize("head", section.heading)
    yield f"  {colorize('head', header)}"
    yield from (f"  {line}" for line in lines)
