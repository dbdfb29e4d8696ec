"""A report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fsdp_runtime.estimate.report.sections import Section
from tp_plans.text import colorize

_TONES = {"good": "+", "bad": "error", "": "head"}


def text_lines(sections: Iterable[Section]) -> Iterator[str]:
    """The lines of a report, sections apart by an empty one; colours where a terminal shows them."""
    for at, section in enumerate(sections):
        if at:
            yield ""
        if section.rows:
            yield from _table(section)
        else:
            yield colorize(_TONES[section.tone], section.heading)
        yield from (f"  {line}" for line in section.lines)


def aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines of a table; the first ``left`` columns begin below one another, the others end so."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _table(section: Section) -> Iterator[str]:
    header, *lines = aligned(section.rows, left=section.left)
    yield colorize("head", section.heading)
    yield f"  {colorize('head', header)}"
    yield from (f"  {line}" for line in lines)
