"""Rows in pipeline stages on two and on four ranks, and the coverage page that shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

from coverage.cells import Row, counts, mark, notes, table
from coverage.outcome import failure
from coverage.pipeline import pipeline_outcome
from coverage.shrink import SIZES
from fsdp_runtime.steps import Pipeline
from harness.ranks import RankPool, RanksFailed

#: The modes of a row, with the number of ranks and of stages.
MODES = {"pp=2": 2, "pp=4": 4}


#: Notes of rows with a fixed number of blocks in their tiny config.
_FEWER_BLOCKS = ("each stage needs a block", "StrictDataclassClassValidationError")


def stages_outcome(pool: RankPool, name: str, stages: int, *, timeout: float) -> dict[str, Any]:
    """Measure one architecture on the ranks of a pool; return the first outcome of a rank that is not right.

    Nothing is returned for a tiny config with a fixed number of blocks, fewer than stages.
    """
    try:
        outcomes = pool.run(_measured, name, stages, timeout=timeout)
    except RanksFailed as failed:
        found = failure(failed, 0.0)
        return {"status": found.status, "note": found.note}
    return judged(next((each for each in outcomes if each["status"] != "right"), outcomes[0]))


def judged(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return an outcome, or nothing where the row has too few blocks."""
    return {} if any(note in outcome.get("note", "") for note in _FEWER_BLOCKS) else dict(outcome)


def _measured(name: str, stages: int) -> Mapping[str, Any]:
    """Return the outcome of this rank, for a model with a block for each stage."""
    with patch.dict(SIZES, num_hidden_layers=max(stages, SIZES["num_hidden_layers"])):
        return pipeline_outcome(name, {"pp": stages}, Pipeline(microbatches=stages))


def section(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page, if anything was measured."""
    rows: Mapping[str, Row] = {name: row for name, row in results["rows"].items() if {*MODES} & row.keys()}
    if not rows:
        return
    yield (
        "A row is right (✓) where losses, logits, norm and every gradient of `forward_backward` with 1F1B equal the "
        "whole model's to 1e-12 on every rank; micro-batches have two lengths. Under `pp=4` the tiny "
        "model has four blocks; rows with a fixed number of blocks have no such cell. See [pipeline "
        "parallelism](../guides/pipeline.md)."
    )
    yield ""
    yield from (f"- {mode}: {counts(rows, mode)}" for mode in MODES)
    yield ""
    yield (
        "Stages of other projects, by their sources: transformers 5.24 refuses its pipeline beside FSDP, and beside "
        "tokens dispatched to experts. NeMo Automodel replaces forwards, and needs a table for each class. Unsloth "
        "2026.10 trains adapters of dense decoders; it refuses mixtures, MLA, hybrids, several classes of layers, "
        "images and sound, shared keys and values, trainable tied embeddings, and training of all parameters."
    )
    yield ""
    yield from table(
        ["row", *MODES, "notes"],
        ([name, *(mark(row, mode) for mode in MODES), notes(row, MODES)] for name, row in sorted(rows.items())),
    )
