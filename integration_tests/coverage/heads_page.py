"""The coverage page on heads: classifiers, question answering, trunks, masked and seq2seq models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coverage.cells import NO_PLAN, mark, table, tally

#: The key of the results that holds the rows.
KEY = "heads"
#: Architecture to head to what is kept of it: its class, and by mode the outcome.
HeadRows = Mapping[str, Mapping[str, Mapping[str, Any]]]

_TITLES = {"TP": "TP", "SP": "SP", "transformers": "transformers' own TP"}


def section(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page; none where nothing was measured."""
    rows: HeadRows = results.get(KEY, {})
    if not rows:
        return
    heads = list(dict.fromkeys(head for row in rows.values() for head in row))
    modes = [mode for mode in _TITLES if any(mode in cell for row in rows.values() for cell in row.values())]
    yield (
        "Every class that transformers maps an architecture to, on two ranks of `tp` against one process in float64: "
        "each output, the loss with labels, and every gradient on every rank agree to 1e-12, for rows with padding "
        "left and right. Classifiers have 3 labels, reward models 1; a trunk (`AutoModel`) gives its hidden states. "
        "An empty cell: there is no such class, or it was not measured. transformers' own tensor parallelism "
        '(`tp_plan="auto"`) runs the same classes on the same rows; it is refused where transformers has no plan for a '
        "class, or one that splits none of its parameters. See [heads](../guides/other-models.md)."
    )
    yield ""
    for mode in modes:
        found = [cell[mode]["status"] for row in rows.values() for cell in row.values() if mode in cell]
        yield f"- {_TITLES[mode]}: {tally(found)}"
    yield ""
    yield f"Each cell: {', '.join(_TITLES[mode] for mode in modes)}; one mark where they are the same."
    yield ""
    cells = (
        [name, *(_marks(row.get(head, {}), modes) for head in heads), [*_notes(row, modes)]]
        for name, row in sorted(rows.items())
    )
    yield from table(["row", *heads, "notes"], cells)


def _marks(cell: Mapping[str, Any], modes: Sequence[str]) -> str:
    """Return the marks of a class, one for each mode; one alone where all are the same."""
    marks = [mark(cell, mode) or "not measured" for mode in modes]
    return "" if not cell else ", ".join(marks if len({*marks}) > 1 else marks[:1])


def _notes(row: Mapping[str, Mapping[str, Any]], modes: Sequence[str]) -> Iterator[str]:
    """Yield the notes of a row; one that several heads share is given once."""
    seen: dict[str, str] = {}
    for head, cell in row.items():
        for mode in modes:
            note = cell.get(mode, {}).get("note")
            if note and note not in {*seen, NO_PLAN}:
                seen[note] = f"{head}, {_TITLES[mode]}"
    for note, where in seen.items():
        yield f"{where}: {note}"
