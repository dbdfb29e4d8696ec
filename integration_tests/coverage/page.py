"""The results as JSON, the page that shows them, and what has got worse since they were last checked in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coverage import (
    bfloat16_tensor,
    compiled,
    context_parallel,
    expert_page,
    heads_page,
    multimodal_page,
    widths,
)
from coverage.cells import mark, notes, share, table, text
from coverage.outcome import Outcome
from coverage.table import UNBUILDABLE, Entry

#: One row: mode to what is kept of its outcome.
Row = dict[str, dict[str, Any]]

_TITLES = {"TP": "TP", "SP": "SP", "transformers": "transformers' own TP"}
#: What follows the table, in this order: each yields its lines from the results, none where nothing was measured.
SECTIONS: tuple[Callable[[Mapping[str, Any]], Iterator[str]], ...] = (
    expert_page.section,
    widths.section,
    bfloat16_tensor.section,
    compiled.section,
    multimodal_page.section,
    heads_page.section,
)
#: What a row's notes say of parameters that stay whole: those above this share of the model.
_NOTEWORTHY = 0.01


def versions() -> dict[str, str]:
    """The releases that a run was measured on."""
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers")}


def kept(outcome: Outcome) -> dict[str, Any]:
    """Return what is kept of an outcome: nothing that differs from run to run."""
    data: dict[str, Any] = {"status": outcome.status}
    if outcome.note:
        data["note"] = outcome.note
    if outcome.share is not None:
        data["share"] = round(outcome.share, 3)
        data["whole"] = {pattern: round(share, 3) for pattern, share in outcome.whole.items() if share > _NOTEWORTHY}
    return data


def read(path: Path) -> dict[str, Any]:
    """The results in a file, or none."""
    return json.loads(path.read_text()) if path.exists() else {"rows": {}}


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Results to a file, all or nothing."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(path)


def regressions(before: Mapping[str, Row], now: Mapping[str, Row]) -> list[str]:
    """What was right before and is no longer."""
    return [
        f"{name}, {mode}: {now[name][mode]['status']}: {now[name][mode].get('note', '')}"
        for name in before.keys() & now.keys()
        for mode in before[name].keys() & now[name].keys()
        if before[name][mode]["status"] == "right" != now[name][mode]["status"]
    ]


def markdown(results: Mapping[str, Any], entries: Mapping[str, Entry]) -> str:
    """The page of a whole run."""
    rows = {name: row for name, row in results["rows"].items() if name in entries}
    return (
        "\n".join(
            [
                *_head(results, rows, entries),
                *_table(rows, entries),
                "",
                *_unbuildable(entries),
                *(line for section in SECTIONS for line in section({**results, "rows": rows})),
            ]
        )
        + "\n"
    )


def _head(results: Mapping[str, Any], rows: Mapping[str, Row], entries: Mapping[str, Entry]) -> Iterator[str]:
    yield "# Coverage"
    yield ""
    releases = " and ".join(f"{name} {number}" for name, number in results["versions"].items())
    yield (
        f"Tiny models in float64 on {results['tp']} CPU ranks against one process, {releases}; written by "
        "`nox -s coverage`. An architecture is right (✓) where the logits and every parameter's gradient agree on "
        "every rank, for token ids alone, with position ids, and with padding left and right, and where the weights "
        "gather to the ones that were split. The share is that of the parameter bytes that the loss reaches whose "
        "storage is split over `tp`; notes name what stays whole above 1 %. Real models are wider, so that what "
        "cannot be split weighs less."
    )
    yield ""
    for mode in ("TP", "SP", "transformers"):
        groups = {
            "that transformers ships a plan for": [name for name in rows if entries[name].shipped],
            "without a shipped plan for their layers": [name for name in rows if entries[name].unplanned],
            "other rows (variants, remote-code models)": [
                name for name in rows if not (entries[name].shipped or entries[name].unplanned)
            ],
        }
        parts = [f"{counts} {what}" for what, names in groups.items() if (counts := _counts(rows, names, mode))]
        if parts:
            yield f"- {_TITLES[mode]}: {'; '.join(parts)}"
    packed = [row["packed"] for row in rows.values() if "packed" in row]
    if packed:
        right, leaks = sum(e["status"] == "right" for e in packed), sum(e.get("leaks", False) for e in packed)
        yield (
            f"- [Packed rows](guides/packed-sequences.md): {right} of {len(packed)} right with "
            "`packed_sequences=True`, on one process: every document's logits, and the sum of all gradients, equal "
            "those of the documents alone to 1e-12, and the tokens of other documents change nothing. Without the "
            f"option a document reads another in {leaks} of them (leaks)."
        )
    yield from context_parallel.summary(rows)
    low = [row["bfloat16"]["status"] for row in rows.values() if "bfloat16" in row]
    if low:
        yield (
            f"- [bfloat16](guides/offload.md): {low.count('right')} of {len(low)} right under FSDP2 on two ranks, with "
            "the parameters that the class keeps in float32, with and without a mixed-precision policy: logits and all "
            "gradients equal those of one process bit for bit, or where notes say so to one rounding of bfloat16."
        )
    yield from expert_page.summary(rows)
    yield ""


def _counts(rows: Mapping[str, Row], names: Sequence[str], mode: str) -> str:
    found = [rows[name][mode] for name in names if mode in rows[name]]
    right = [each for each in found if each["status"] == "right"]
    mostly = sum(each["share"] >= 0.95 for each in right)
    return f"{len(right)} of {len(found)} right ({mostly} with at least 95 % split)" if found else ""


def _table(rows: Mapping[str, Row], entries: Mapping[str, Entry]) -> Iterator[str]:
    peers = any("transformers" in row for row in rows.values())
    theirs = ["transformers' own", "split"] if peers else []
    packs = ["packed", "packed without the option"] if any("packed" in row for row in rows.values()) else []
    contexts = [mode for mode in (*context_parallel.MODES, "bfloat16") if any(mode in row for row in rows.values())]
    titles = ["row", "class", "TP", "SP", "split", *theirs, *packs, *contexts, "notes"]
    yield from table(
        titles, (_cells(name, rows[name], entries[name], theirs, packs, contexts) for name in sorted(rows))
    )


def _cells(
    name: str, row: Row, entry: Entry, peers: Sequence[str], packs: Sequence[str], contexts: Sequence[str]
) -> list[str]:
    own = [mark(row, "TP"), mark(row, "SP"), share(row, "TP")]
    theirs = [mark(row, "transformers"), share(row, "transformers")] if peers else []
    packed = [mark(row, "packed"), _leaks(row)] if packs else []
    return [name, entry.class_name, *own, *theirs, *packed, *(mark(row, mode) for mode in contexts), _notes(row)]


def _leaks(row: Row) -> str:
    leaks = row.get("packed", {}).get("leaks")
    return "" if leaks is None else "leaks" if leaks else "✓"


def _notes(row: Row) -> str:
    told = notes(row, ("TP", "SP", "packed", *context_parallel.MODES, "bfloat16"))
    if whole := row.get("TP", {}).get("whole"):
        told.append("whole: " + ", ".join(f"`{pattern}` {100 * share:.0f} %" for pattern, share in whole.items()))
    return text(told)


def _unbuildable(entries: Mapping[str, Entry]) -> Iterator[str]:
    for name, reason in UNBUILDABLE.items():
        yield f"Not measured: {name}, {reason}."
