"""The coverage page on decoders: tensor and sequence parallelism, next to transformers' own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coverage.cells import Cell, Row, mark, notes, share, table
from coverage.table import UNBUILDABLE, Entry

_TITLES = {"TP": "TP", "SP": "SP", "transformers": "transformers' own TP"}
#: The kinds of rows of decoders, and which entries they have.
_GROUPS = {
    "that transformers ships a plan for": lambda entry: entry.shipped,
    "without a shipped plan for their layers": lambda entry: entry.unplanned,
    "other rows (variants, remote-code models)": lambda entry: not (entry.shipped or entry.unplanned),
}


def section(results: Mapping[str, Any], entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield the lines of the page."""
    rows: Mapping[str, Row] = results["rows"]
    yield (
        "An architecture is right (✓) where the logits and every parameter's gradient agree on every rank with one "
        "process, for token ids alone, with position ids, and with padding left and right, and where the weights "
        "gather to the ones that were split. The share is that of the parameter bytes that the loss reaches whose "
        "storage is split over `tp`. Notes name what stays whole above 1 %. Real models are wider, so that what "
        "cannot be split weighs less."
    )
    yield ""
    yield from summary(rows, entries)
    yield ""
    peers = ["transformers' own", "split"] if any("transformers" in row for row in rows.values()) else []
    titles = ["row", "class", "TP", "SP", "split", *peers, "notes"]
    yield from table(titles, (_cells(name, rows[name], entries[name], peers) for name in sorted(rows)))
    yield ""
    for name, reason in UNBUILDABLE.items():
        yield f"- not measured: {name}, {reason}"


def summary(rows: Mapping[str, Row], entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield a line for each way: the rows of each kind that are right."""
    for mode, title in _TITLES.items():
        groups = {what: [name for name in rows if holds(entries[name])] for what, holds in _GROUPS.items()}
        parts = [f"{told} {what}" for what, names in groups.items() if (told := _counts(rows, names, mode))]
        if parts:
            yield f"- {title}: {'; '.join(parts)}"


def _counts(rows: Mapping[str, Row], names: Sequence[str], mode: str) -> str:
    found = [rows[name][mode] for name in names if mode in rows[name]]
    right = [each for each in found if each["status"] == "right"]
    mostly = sum(each["share"] >= 0.95 for each in right)
    return f"{len(right)} of {len(found)} right ({mostly} with at least 95 % split)" if found else ""


def _cells(name: str, row: Row, entry: Entry, peers: Sequence[str]) -> list[Cell]:
    own = [mark(row, "TP"), mark(row, "SP"), share(row, "TP")]
    theirs = [mark(row, "transformers"), share(row, "transformers")] if peers else []
    return [name, entry.class_name, *own, *theirs, _notes(row)]


def _notes(row: Row) -> list[str]:
    told = notes(row, ("TP", "SP"))
    if whole := row.get("TP", {}).get("whole"):
        told.append("whole: " + ", ".join(f"`{pattern}` {100 * share:.0f} %" for pattern, share in whole.items()))
    return told
