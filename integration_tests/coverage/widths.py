"""Four and eight ranks of ``tp``, and ``tp`` with FSDP2: what is measured, and the page about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coverage.cells import Cell, Row, counts, mark, notes, share, table

#: Other positions and masks are measured on two ranks; they do not depend on how weights are split.
WIDTH_KINDS = ("ids",)


@dataclass(frozen=True)
class Width:
    """One mesh and one mode of ``measure``.

    Args:
        tp: ranks of ``tp``.
        mode: ``"TP"``, ``"SP"`` or ``"transformers"``.
        dp_shard: ranks of FSDP2.
        unless: what has to be refused for this to be measured.
    """

    tp: int
    mode: str = "TP"
    dp_shard: int = 1
    unless: str | None = None

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.tp * self.dp_shard


#: What is measured, by its name in a row.
WIDTHS: Mapping[str, Width] = {
    "tp=4": Width(4),
    "tp=4 SP": Width(4, "SP"),
    "dp_shard=2 tp=2 SP": Width(2, "SP", dp_shard=2),
    "dp_shard=2 tp=2": Width(2, dp_shard=2, unless="dp_shard=2 tp=2 SP"),
    "transformers tp=4": Width(4, "transformers"),
    "tp=8": Width(8),
    "tp=8 SP": Width(8, "SP"),
}


def is_due(row: Mapping[str, Mapping[str, Any]], mode: str) -> bool:
    """Return whether something has still to be measured for a row."""
    other = WIDTHS[mode].unless
    return mode not in row and (other is None or row[other]["status"] != "right")


def section(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page, if anything was measured."""
    rows = {name: row for name, row in results["rows"].items() if WIDTHS.keys() & row.keys()}
    if not rows:
        return
    yield (
        "Token ids alone, on the ranks of `tp` named above each column, and on 4 ranks of which two each share the "
        "rows (FSDP2 with sequence parallelism, or without it where that is refused). The models have 8 heads and 8 "
        "experts, and a vocabulary of 131, whose parts are of two sizes. Most have 4 heads of keys and values: with "
        "`tp=8` two ranks share each, and each of the two stores half of its weights. What was off by more than the "
        "bounds was measured again with all of its code in float64, and is right if that is; notes say so."
    )
    yield ""
    yield from (f"- {mode}: {told}" for mode in WIDTHS if (told := counts(rows, mode)))
    yield ""
    peers = ["transformers tp=4"] if any("transformers tp=4" in row for row in rows.values()) else []
    titles = ["row", "tp=4", "SP", "split", "tp=8", "SP", "split", "dp_shard=2 tp=2", *peers, "notes"]
    yield from table(titles, ([name, *_cells(rows[name], peers)] for name in sorted(rows)))


def _cells(row: Row, peers: list[str]) -> list[Cell]:
    together = next((mode for mode in ("dp_shard=2 tp=2", "dp_shard=2 tp=2 SP") if mode in row), "")
    own = [cell for tp in ("tp=4", "tp=8") for cell in (mark(row, tp), mark(row, f"{tp} SP"), share(row, tp))]
    modes = [mode for mode in WIDTHS if mode not in peers]
    return [*own, mark(row, together), *(mark(row, mode) for mode in peers), notes(row, modes)]
