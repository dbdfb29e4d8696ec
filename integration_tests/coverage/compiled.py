"""One architecture with compiled blocks: the same numbers, and the graphs, breaks and recompilations it takes.

The first batch compiles for its own length, the second length makes the compiler compile once more with the length
as a variable, and a third needs nothing new, unless the compiler learns from it that it guessed wrongly.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from coverage.cells import Cell, Row, counts, mark, notes, table
from coverage.measure import MODES, Refused, default_dtype, gradient_errors
from coverage.outcome import failure
from coverage.shrink import VOCAB
from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import FsdpRuntimeError, parallelize
from fsdp_runtime.steps import Compile
from harness.compiler import forget_compiled, graph_breaks, graphs_compiled
from harness.parity import GRADIENT_BOUND, OUTPUT_BOUND, largest, logits_of, mesh_for
from harness.ranks import RankPool, RanksFailed
from tp_plans import TpPlansError

BATCH = 3
#: Lengths of the batches, in this order: all odd, so that none divides by the ranks.
LENGTHS = (7, 9, 11)
#: Experts in one product of batches.  The eager ones loop over the experts that were hit, which are data, and break
#: every graph; the default, grouped products, has no kernel in float64.
EXPERTS = "batched_mm"
#: The ways in which blocks are compiled: under ``tp`` on all ranks, and in one process without a plan.
WAYS = ("TP", "SP")
ALONE = "one process"
#: The second one differs from the first in what ``inductor`` does before it writes code: it takes operators apart and
#: decides what to recompute.  It is for rows whose graphs the first one cannot run.
BACKENDS = ("aot_eager", "aot_eager_decomp_partition", "inductor")
#: The modes of a row with a plan: ``"inductor TP"``.
OURS = tuple(f"{backend} {way}" for backend in BACKENDS for way in WAYS)
#: Reasons of breaks that a note lists.
_LISTED = 3


@dataclass(frozen=True)
class Compiled:
    """What one rank finds.

    Args:
        errors: what is off, as text.
        graphs: the graphs compiled up to the end of every length's step.
        breaks: breaks of graphs by reason.
    """

    errors: tuple[str, ...]
    graphs: tuple[int, ...]
    breaks: Mapping[str, int]


def measure_compiled(name: str, mode: str, *, backend: str, lengths: Sequence[int] = LENGTHS) -> Compiled:
    """Measure one architecture with compiled blocks on this rank; every rank of the world must call it."""
    entry = replace(coverage_entries()[name], experts=EXPERTS)
    with default_dtype(torch.float64 if entry.default_float64 else torch.float32):
        reference = tiny_model(entry)
        forget_compiled()
        try:
            candidate = _parallelized(
                copy.deepcopy(reference), mode, compile=Compile({"backend": backend}), **entry.options
            )
        except (TpPlansError, FsdpRuntimeError) as error:
            raise Refused(str(error)) from error
        errors: dict[str, None] = {}
        graphs = []
        for length in lengths:
            errors |= dict.fromkeys(_mismatches(reference, candidate, length))
            graphs.append(graphs_compiled())
        return Compiled(tuple(errors), tuple(graphs), graph_breaks())


def _parallelized(model: nn.Module, mode: str, **options: Any) -> nn.Module:
    if mode == ALONE:
        return parallelize(model, mesh_for({}), **{**options, "plan": None})
    return MODES[mode](model, mesh_for({"tp": torch.distributed.get_world_size()}), **options)


def _mismatches(reference: nn.Module, candidate: nn.Module, length: int) -> list[str]:
    """Return what the two models compute differently in a step on rows of one length."""
    ids = torch.randint(3, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(length))
    logits: list[Tensor] = []
    for model in (copy.deepcopy(reference), candidate):  # a copy: some modules keep a state of their last forward
        model.zero_grad()
        logits.append(logits_of(model, {"input_ids": ids}))
        weights = torch.randn(logits[0].shape, dtype=logits[0].dtype, generator=torch.Generator().manual_seed(2))
        (logits[-1] * weights).sum().backward()
        if model is not candidate:
            gradients = {path: parameter.grad for path, parameter in model.named_parameters()}
    error = largest(logits[1] - logits[0])
    found = [] if error <= OUTPUT_BOUND else [f"output off by {error:.1e}"]
    for path, error in gradient_errors(reference, candidate, gradients):
        if not error <= GRADIENT_BOUND:
            found.append(f"gradient of {path} off by {error:.1e}")
    return found


def compiled_outcome(
    pool: RankPool, name: str, mode: str, *, backend: str, lengths: Sequence[int] = LENGTHS, timeout: float
) -> dict[str, Any]:
    """Measure one architecture on the ranks of a pool, and return what is kept of it."""
    try:
        return kept(pool.run(measure_compiled, name, mode, backend=backend, lengths=lengths, timeout=timeout))
    except RanksFailed as failed:
        found = failure(failed, 0.0)
        return {"status": found.status, "note": re.sub(r" \([^()]*<eval_with_key>.*", "", found.note)}  # numbered anew


def kept(ranks: Sequence[Compiled]) -> dict[str, Any]:
    """Return what is kept of the ranks' findings: of counts the largest of all ranks."""
    wrong = dict.fromkeys(error for rank in ranks for error in rank.errors)
    worst = max(ranks, key=lambda rank: sum(rank.breaks.values()))
    data: dict[str, Any] = {
        "status": "wrong" if wrong else "right",
        "graphs": [max(each) for each in zip(*(rank.graphs for rank in ranks), strict=True)],
        "breaks": sum(worst.breaks.values()),
    }
    if wrong:
        data["note"] = "; ".join([*wrong][:_LISTED])
    if worst.breaks:
        data["reasons"] = [_reason(break_) for break_ in [*worst.breaks][:_LISTED]]
    return data


def _reason(told: str) -> str:
    """Return the first lines of a break's reason, without paths of this machine."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return re.sub(r"/\S*/", "", " ".join(lines[:2]))[:200]


def breaks(found: Mapping[str, Any]) -> bool:
    """Return True where compiled blocks broke, failed or were wrong."""
    return bool(found.get("breaks")) or found["status"] in ("wrong", "failed", "hung")


def compile_is_due(row: Row, mode: str, lengths: Sequence[int]) -> bool:
    """Return True where a mode has not been measured, or for fewer lengths; the model's own breaks matter after others.

    What is wrong, refused or fails at its first length is not measured again.
    """
    backend, _, way = mode.partition(" ")
    if way == ALONE and not any(breaks(row[tried]) for each in WAYS if (tried := f"{backend} {each}") in row):
        return False
    found = row.get(mode)
    return found is None or (found["status"] == "right" and way != ALONE and len(found["graphs"]) < len(lengths))


def section(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page, if anything was measured."""
    rows = {name: row for name, row in results["rows"].items() if {*OURS} & row.keys()}
    if not rows:
        return
    shown = [mode for mode in OURS if any(mode in row for row in rows.values())]
    yield (
        '`compile=Compile({"backend": ...})` under `tp=2`, in float64 (experts as `batched_mm`): a row is right where '
        "logits and gradients of each step equal those of one process without a compiler. The numbers are the graphs "
        "that have been compiled after each step; each step has rows of another length, odd ones, of which the first "
        f"compiles for its own ({', '.join(map(str, LENGTHS))} tokens; one number: one step). A second graph for a "
        "second length is the one for any length. Breaks are places where the compiler leaves a block to Python, next "
        "to those of the same blocks in one process without a plan. A row that fails there, too, is not for a plan to "
        "mend: the compiler cannot take the model."
    )
    yield ""
    yield from (f"- {mode}: {_sums(rows, mode)}" for mode in shown)
    yield ""
    yield from table(
        ["row", *shown, "breaks in one process", "notes"],
        ([name, *_cells(row, shown)] for name, row in sorted(rows.items())),
    )


def _sums(rows: Mapping[str, Row], mode: str) -> str:
    """Return how many rows are right, break, fail in one process too, and compile anew for a third length."""
    measured = [row for row in rows.values() if mode in row]
    right = [row[mode] for row in measured if row[mode]["status"] == "right"]
    told = [counts(rows, mode), f"{sum(not each['breaks'] for each in right)} without a break"]
    if own := sum(_fails_alone(row, mode) for row in measured):
        told.append(f"{own} {'fails' if own == 1 else 'fail'} in one process without a plan, too")
    steps = [each["graphs"] for each in right if len(each["graphs"]) == len(LENGTHS)]
    if steps:
        new = sum(graphs[-1] > graphs[-2] for graphs in steps)
        told.append(f"a third length compiles something in {new} of {len(steps)} rows")
    return "; ".join(told)


def _fails_alone(row: Row, mode: str) -> bool:
    """Return True where blocks fail, and the same ones in one process without a plan."""
    alone = f"{mode.partition(' ')[0]} {ALONE}"
    return row.get(mode, {}).get("status") == row.get(alone, {}).get("status") == "failed"


def _cell(row: Row, mode: str) -> str:
    """Return a mode's mark, the graphs after each step, and the breaks where there are any."""
    if _fails_alone(row, mode):
        return "fails in one process, too"
    found = row.get(mode, {})
    told = mark(row, mode), ", ".join(map(str, found.get("graphs", ())))
    return " ".join(filter(None, (*told, f"(breaks: {found['breaks']})" if found.get("breaks") else "")))


def _cells(row: Row, shown: Sequence[str]) -> list[Cell]:
    cells = [_cell(row, mode) for mode in shown]
    alone = [row[mode] for mode in row if mode.endswith(ALONE)]
    own = [str(each["breaks"]) if "breaks" in each else each["status"] for each in alone]
    reasons = [reason for mode in shown for reason in row.get(mode, {}).get("reasons", ())]
    return [*cells, ", ".join(own), [*notes(row, shown), *dict.fromkeys(reasons)]]
