"""The coverage page on packed rows: on one process, and over two ranks of ``cp`` in each way of attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from coverage.cells import Row, mark, notes, table
from coverage.context_parallel import MODES, summary


def section(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page, if anything was measured."""
    rows: Mapping[str, Row] = {name: row for name, row in results["rows"].items() if {"packed", *MODES} & row.keys()}
    if not rows:
        return
    packed = [row["packed"] for row in rows.values() if "packed" in row]
    right, leaks = sum(each["status"] == "right" for each in packed), sum(each.get("leaks", False) for each in packed)
    yield (
        "A row of several documents is right (✓) where every document's logits, and the sum of all gradients, equal "
        "those of the documents alone to 1e-12, and where the tokens of other documents change nothing. *leaks*: "
        "without the option a document reads another. See [packed rows](../guides/packed-sequences.md) and "
        "[context parallelism](../guides/context-parallelism.md)."
    )
    yield ""
    if packed:
        yield f"- `packed_sequences=True` on one process: {right} of {len(packed)} right"
        yield f"- without the option: {leaks} of {len(packed)} leak"
    yield from summary(rows)
    yield ""
    yield from table(
        ["row", "packed", "without the option", *MODES, "notes"],
        (
            [name, mark(row, "packed"), _leaks(row), *(mark(row, m) for m in MODES), notes(row, ("packed", *MODES))]
            for name, row in sorted(rows.items())
        ),
    )


def _leaks(row: Row) -> str:
    leaks = row.get("packed", {}).get("leaks")
    return "" if leaks is None else "leaks" if leaks else "✓"
