"""Cells and tables of the coverage pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

#: One row: mode to what is kept of its outcome.
Row = Mapping[str, Mapping[str, Any]]

MARKS = {
    "right": "✓",
    "wrong": "✗ wrong",
    "refused": "refused",
    "failed": "✗ fails",
    "hung": "✗ hangs",
    "alone": "one process fails",
}
#: What transformers' own refusal says, which the mark tells by itself.
NO_PLAN = "transformers ships no plan for this model"
#: The longest note below a table.
_LONGEST = 400
#: What a table shows in one column: its text, or notes, of which it shows the numbers.
Cell = str | Sequence[str]


def mark(row: Row, mode: str) -> str:
    """Return the mark of an outcome, empty where nothing was measured."""
    return MARKS[row[mode]["status"]] if mode in row else ""


def share(row: Row, mode: str) -> str:
    """Return the share of the bytes that is split, in percent."""
    found = row.get(mode, {}).get("share")
    return "" if found is None else f"{100 * found:.1f} %"


def notes(row: Row, modes: Iterable[str]) -> list[str]:
    """Return the notes of the modes; one that several have is listed once."""
    found: dict[str, list[str]] = {}
    for mode in modes:
        if note := row.get(mode, {}).get("note"):
            found.setdefault(note, []).append(mode)
    return [f"{', '.join(told)}: {note}" for note, told in found.items()]


def one_line(note: str) -> str:
    """Return a note on one line, without its end where it is very long."""
    told = re.sub(r"\s+", " ", note)
    return told if len(told) <= _LONGEST else f"{told[:_LONGEST]}…"


def table(titles: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Iterator[str]:
    """Yield the lines of a table, and below it the notes of its cells, numbered; equal notes have one number."""
    numbers: dict[str, int] = {}
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for cells in rows:
        shown = (cell if isinstance(cell, str) else _numbered(cell, numbers) for cell in cells)
        yield f"| {' | '.join(shown)} |"
    if numbers:
        yield ""
        yield from (f"{number}. {note}" for note, number in numbers.items())


def _numbered(told: Sequence[str], numbers: dict[str, int]) -> str:
    """Return the numbers of notes; a new note gets the next one."""
    return ", ".join(str(numbers.setdefault(one_line(note), len(numbers) + 1)) for note in told)


def counts(rows: Mapping[str, Row], mode: str) -> str:
    """Return how many rows are right in a mode, and how many are refused; empty where none was measured."""
    found = [row[mode]["status"] for row in rows.values() if mode in row]
    refused = f", {found.count('refused')} refused" if "refused" in found else ""
    return f"{found.count('right')} of {len(found)} right{refused}" if found else ""


def tally(found: Sequence[str]) -> str:
    """Return how many of some outcomes are right, and how many have each other status that occurs."""
    others = {
        "refused": "refused",
        "wrong": "wrong",
        "failed": "failed",
        "hung": "hung",
        "alone": "fail in one process",
    }
    told = [f"{found.count(status)} {word}" for status, word in others.items() if status in found]
    return ", ".join([f"{found.count('right')} of {len(found)} right", *told])
