"""The coverage page on bfloat16: under FSDP2, and with tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from coverage import bfloat16_tensor
from coverage.cells import Row, counts, mark, notes, table


def section(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page, if anything was measured."""
    rows: Mapping[str, Row] = {name: row for name, row in results["rows"].items() if "bfloat16" in row}
    if rows:
        yield from _sharded(rows)
    tensor = [*bfloat16_tensor.section(results)]
    yield from ["", *tensor] if rows and tensor else tensor


def _sharded(rows: Mapping[str, Row]) -> Iterator[str]:
    yield "## Under FSDP2"
    yield ""
    yield (
        "Models on two ranks, with the parameters that the class keeps in float32, with and without a mixed-precision "
        "policy. A row is right (✓) where logits and all gradients equal those of one process bit for bit, or, where "
        "a note says so, to rounding: one of bfloat16, and where blocks read the states of all blocks before, as far "
        "as one process is from float64. See [memory](../guides/memory.md)."
    )
    yield ""
    yield f"- FSDP2: {counts(rows, 'bfloat16')}"
    yield ""
    yield from table(
        ["row", "FSDP2", "notes"],
        ([name, mark(row, "bfloat16"), notes(row, ("bfloat16",))] for name, row in sorted(rows.items())),
    )
