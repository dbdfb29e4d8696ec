"""Packed rows over two ranks of ``cp``, in each way of attention: is every document computed as it is alone?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from coverage.packing import PACKED_BOUND, measure_packing_on_ranks
from fsdp_runtime import FsdpRuntimeError
from fsdp_runtime.steps.context.methods import Method
from harness.ranks import RankPool

#: The ways, as modes of a row: ``"cp=2 ring"``.
MODES = {f"cp=2 {way}": way for way in get_args(Method)}


def context_outcomes(pool: RankPool, name: str, *, timeout: float) -> dict[str, dict[str, Any]]:
    """Measure one architecture on the two ranks of a pool, and return what is kept of each mode.

    Args:
        pool: the ranks.
        name: the row.
        timeout: seconds of one mode.
    """
    return of_all_ranks(pool.run(measure_context, name, timeout=len(MODES) * timeout))


def measure_context(name: str) -> dict[str, dict[str, Any]]:
    """Return what this rank finds, by mode; every rank of a world of two must call it."""
    return {mode: _outcome(name, way) for mode, way in MODES.items()}


def _outcome(name: str, way: Method) -> dict[str, Any]:
    try:
        errors = measure_packing_on_ranks(name, {"cp": 2}, context_parallel=way)
    except FsdpRuntimeError as error:
        return {"status": "refused", "note": str(error)}
    except Exception as error:  # of any kind: a row that fails costs itself only
        return {"status": "failed", "note": f"{type(error).__name__}: {error}"[:300]}
    wrong = {path: error for path, error in errors.items() if not error <= PACKED_BOUND}
    if not wrong:
        return {"status": "right"}
    worst = max(wrong, key=lambda path: wrong[path])
    return {"status": "wrong", "note": f"{len(wrong)} tensors, {worst} off by {wrong[worst]:.1e}"}


def of_all_ranks(found: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the outcomes of the ranks as one: the first that is not right."""
    return {
        mode: next((each[mode] for each in found if each[mode]["status"] != "right"), found[0][mode]) for mode in MODES
    }


def summary(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the lines of the page that count the rows of each way."""
    for mode, way in MODES.items():
        found = [row[mode]["status"] for row in rows.values() if mode in row]
        if found:
            yield (
                f'- `context_parallel="{way}"`, packed rows on 2 ranks of `cp`: {found.count("right")} of {len(found)} '
                f"right (logits and all gradients on all ranks, to 1e-12), {found.count('refused')} refused"
            )
