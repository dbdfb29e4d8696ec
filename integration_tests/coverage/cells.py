"""Cells and tables of the coverage page."""

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
#: The longest text of notes in a table.
_LONGEST = 400


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


def text(parts: Sequence[str], longest: int = _LONGEST) -> str:
    """Return notes as the text of a cell."""
    told = re.sub(r"\s+", " ", "; ".join(parts)).replace("|", "\\|")
    return told if len(told) <= longest else f"{told[:longest]}…"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


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
