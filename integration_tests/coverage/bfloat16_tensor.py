"""One architecture in bfloat16 under tensor and sequence parallelism, against one process in bfloat16.

The ranks of ``tp`` sum in another order than one process and round the parts to bfloat16, so nothing can be equal bit
for bit.  Both are compared with the same weights in float64 instead: the split model may not be farther from exact
than the one process by more than ``FACTOR``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from coverage.cells import counts, mark, notes, table
from coverage.measure import MODES, Refused, default_dtype
from coverage.outcome import failure
from coverage.shrink import VOCAB
from coverage.table import converted, coverage_entries, tiny_model
from fsdp_runtime import FsdpRuntimeError
from harness.parity import logits_of, mesh_for
from harness.ranks import RankPool, RanksFailed
from tp_plans import TpPlansError

BATCH, LENGTH = 3, 7
#: The largest relative error of one rounding to bfloat16, whose significand has 8 bits (Higham, Accuracy and
#: Stability of Numerical Algorithms, 2002, section 2.2).
ROUNDING = 2**-8
#: How much farther from exact a sum over ranks may be.  One process accumulates a product in float32 and rounds once;
#: two ranks round their parts and then the sum.  Three independent errors of one size are sqrt(3) as large as one, and
#: what has no such sums in it adds nothing.
FACTOR = 2.0
#: Seeds of the token ids, as many as are needed.  Near a tie of its scores a rounding sends a token to another expert,
#: and every result behind it is another one.  What is wrong is wrong for any tokens, so a tensor's best batch counts.
SEEDS = range(1, 9)
#: Modes of ``measure`` to their names in a row.
MODE_NAMES = {"TP": "bfloat16 tp=2", "SP": "bfloat16 tp=2 SP"}
#: What a note lists.
_LISTED = 3

Results = dict[str, Tensor | None]


def measure_bfloat16_tensor(name: str) -> dict[str, dict[str, Any]]:
    """Return what this rank finds, by mode; every rank of the world must call it."""
    entry = coverage_entries()[name]
    model = tiny_model(entry, dtype=torch.bfloat16)
    exact_model = converted(copy.deepcopy(model), torch.float64)

    @cache
    def in_one_process(seed: int) -> tuple[Results, Results]:
        try:
            with default_dtype(torch.float64 if entry.default_float64 else torch.float32):
                exact = _results(exact_model, seed)
            return exact, _results(model, seed)
        except RuntimeError as error:
            raise Refused(f"one process cannot run it in bfloat16: {error}") from error

    in_one_process(SEEDS[0])
    mesh = mesh_for({"tp": torch.distributed.get_world_size()})
    found: dict[str, dict[str, Any]] = {}
    for mode in MODE_NAMES:
        try:
            candidate = MODES[mode](copy.deepcopy(model), mesh, **entry.options)
        except (TpPlansError, FsdpRuntimeError) as error:
            found[mode] = {"status": "refused", "note": str(error)}
            continue
        batches = ((*in_one_process(seed), _results(candidate, seed)) for seed in SEEDS)
        ratios = best_ratios(batches, _largest_of_ranks)
        found[mode] = judged(ratios, [*_changed_dtypes(model, candidate)])
    return found


def best_ratios(
    batches: Iterable[tuple[Results, Results, Results]], largest: Callable[[float], float]
) -> dict[str, float]:
    """Return each tensor's smallest ratio of errors; no further batches are run once all are small enough.

    Args:
        batches: exact results, those of one process, and those of the split model.
        largest: returns the largest of a number on all ranks, which have to run as many batches as each other.
    """
    best: dict[str, float] = {}
    for batch in batches:
        exact, single, split = batch
        found = {path: _ratio(exact[path], single[path], split[path]) for path in exact}
        best = {path: min(ratio, best.get(path, ratio)) for path, ratio in found.items()}
        if largest(max(best.values())) <= FACTOR:
            break
    return best


def _largest_of_ranks(number: float) -> float:
    found = torch.tensor(number, dtype=torch.float64)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return float(found)


def _results(model: nn.Module, seed: int) -> Results:
    """Return the logits and all gradients, as full tensors."""
    running = model if any(isinstance(p, DTensor) for p in model.parameters()) else copy.deepcopy(model)
    running.zero_grad()
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    logits = logits_of(running, {"input_ids": ids})
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    (logits * weights.to(logits.dtype)).sum().backward()
    gradients = {path: parameter.grad for path, parameter in running.named_parameters()}
    full = {path: g.full_tensor() if isinstance(g, DTensor) else g for path, g in gradients.items()}
    return {"the logits": logits.detach(), **full}


def judged(ratios: Mapping[str, float], problems: Sequence[str]) -> dict[str, Any]:
    """Return the outcome of one mode from each tensor's ratio of errors and what else is wrong."""
    wrong = [f"{path} {ratio:.1f} times as far from exact" for path, ratio in ratios.items() if not ratio <= FACTOR]
    found = {"status": "wrong" if problems or wrong else "right", "ratio": round(max(ratios.values()), 2)}
    return found | ({"note": "; ".join([*problems, *wrong][:_LISTED])} if problems or wrong else {})


def _ratio(exact: Tensor | None, single: Tensor | None, split: Tensor | None) -> float:
    """Return the split model's error in multiples of one process's, or of one rounding where that is larger."""
    if exact is None or single is None or split is None:
        return 0.0 if single is None and (split is None or not split.any()) else float("inf")
    if not all(each.isfinite().all() for each in (exact, single, split)):
        return float("inf")
    error, allowed = (float((each.double() - exact).norm()) for each in (split, single))
    allowed = max(allowed, ROUNDING * float(exact.norm()))
    return error / allowed if allowed else (float("inf") if error else 0.0)


def _changed_dtypes(model: nn.Module, candidate: nn.Module) -> Iterator[str]:
    """Yield the parameters and gradients whose dtype is not the model's."""
    dtypes = {path: parameter.dtype for path, parameter in model.named_parameters()}
    for path, parameter in candidate.named_parameters():
        if parameter.dtype != dtypes[path]:
            yield f"{path} is in {parameter.dtype} instead of {dtypes[path]}"
        if parameter.grad is not None and parameter.grad.dtype != dtypes[path]:
            yield f"the gradient of {path} is in {parameter.grad.dtype} instead of {dtypes[path]}"


def bfloat16_tensor_outcomes(pool: RankPool, name: str, *, timeout: float) -> dict[str, dict[str, Any]]:
    """Measure one architecture on the ranks of a pool, and return what is kept of each mode."""
    try:
        ranks = pool.run(measure_bfloat16_tensor, name, timeout=timeout)
    except RanksFailed as failed:
        found = failure(failed, 0.0)
        return {title: {"status": found.status, "note": found.note} for title in MODE_NAMES.values()}
    return {title: _worst([rank[mode] for rank in ranks]) for mode, title in MODE_NAMES.items()}


def _worst(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the outcome of all ranks: the first that is not right, with the largest ratio."""
    first = next((each for each in found if each["status"] != "right"), found[0])
    ratios = [each["ratio"] for each in found if "ratio" in each]
    return {**first, "ratio": max(ratios)} if ratios else dict(first)


def section(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of the page, if anything was measured."""
    titles = [*MODE_NAMES.values()]
    rows = {name: row for name, row in results["rows"].items() if {*titles} & row.keys()}
    if not rows:
        return
    yield "## With tensor parallelism"
    yield ""
    yield (
        "Models in bfloat16, but for the parameters that their classes keep in float32, on two ranks of `tp`. Ranks "
        "sum in another order than one process, so both are compared with the same weights in float64: a row is right "
        f"where the split model's logits and gradients are at most {FACTOR:g} times as far from that as those of one "
        "process in bfloat16 (in root mean square of each tensor, or of one rounding of bfloat16 where the process is "
        "nearer; each tensor in the best of up to eight batches, since a rounding sends a token near a tie to another "
        "expert), and where each parameter and gradient has the dtype that it has in one process. The number is the "
        "largest such factor of all tensors."
    )
    yield ""
    yield from (f"- {mode}: {told}" for mode in titles if (told := counts(rows, mode)))
    yield ""
    yield from table(
        ["row", *(cell for mode in titles for cell in (mode, "factor")), "notes"],
        (
            [
                name,
                *(cell for mode in titles for cell in (mark(row, mode), str(row.get(mode, {}).get("ratio", "")))),
                notes(row, titles),
            ]
            for name, row in sorted(rows.items())
        ),
    )
