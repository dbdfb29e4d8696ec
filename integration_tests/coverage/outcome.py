"""The outcome of one architecture in one mode, from the results or the errors of all ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coverage.expert_parallel import measure_experts
from coverage.measure import RankResult, measure
from harness.parity import GRADIENT_BOUND, OUTPUT_BOUND, RankReport
from harness.ranks import RankError, RankPool, RanksFailed

#: How many mismatches a note lists.
_LISTED = 6
#: Begins the note of what is right in float64 only.
ROUNDED = "right with all of its code in float64; with parts in float32:"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one architecture in one mode.

    Args:
        status: ``"right"``, ``"wrong"``, ``"refused"``, ``"failed"`` (it raised) or ``"hung"``.
        note: why, where it is not right.
        share: the share of the reached parameter bytes that is split over the axis, where it ran.
        whole: the parameters that every rank holds whole, by pattern, with their shares, largest first.
        seconds: what it took.
    """

    status: str
    note: str = ""
    share: float | None = None
    whole: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def evaluate(
    pool: RankPool, name: str, mode: str, *, kinds: tuple[str, ...], timeout: float, dp_shard: int = 1
) -> Outcome:
    """Measure one architecture in one mode; failures of ranks become outcomes, too.

    What is wrong is measured again with all of the model's code in float64: where code computes parts in float32, an
    ill-conditioned gradient can be off by more than the bounds for no other reason than the order of a sum.
    """
    start, tp = time.monotonic(), pool.world_size // dp_shard

    def measured(*, float64: bool) -> Outcome:
        results = pool.run(measure, name, mode, tp=tp, kinds=kinds, dp_shard=dp_shard, float64=float64, timeout=timeout)
        return summarize(results, time.monotonic() - start)

    try:
        found = measured(float64=False)
        if found.status != "wrong":
            return found
        again = measured(float64=True)
    except RanksFailed as failed:
        return failure(failed, time.monotonic() - start)
    return replace(again, note=f"{ROUNDED} {found.note}") if again.status == "right" else found


def evaluate_experts(
    pool: RankPool, name: str, axes: Mapping[str, int], *, way: str = "parallelize", timeout: float
) -> Outcome:
    """Measure one mixture under expert parallelism on one mesh."""
    start = time.monotonic()
    try:
        ranks = pool.run(measure_experts, name, (axes,), way, timeout=timeout)
    except RanksFailed as failed:
        return failure(failed, time.monotonic() - start)
    found = list(_of_reports([report for (report,) in ranks]))
    return Outcome("wrong" if found else "right", "; ".join(found), seconds=time.monotonic() - start)


def _of_reports(reports: Sequence[RankReport]) -> Iterator[str]:
    """Yield what is wrong: for outputs and for each pattern of parameters the largest error of all ranks and layers."""
    yield from dict.fromkeys(problem for report in reports for problem in report.problems)
    output = max(report.output_error for report in reports)
    if not output <= OUTPUT_BOUND:
        yield f"output off by {output:.1e}"
    errors: dict[str, float] = {}
    for path, error in (item for report in reports for item in report.gradient_errors.items()):
        if not error <= GRADIENT_BOUND:
            pattern = re.sub(r"\.\d+(?=\.|$)", ".*", path)
            errors[pattern] = max(error, errors.get(pattern, 0.0))
    for pattern, error in list(errors.items())[:_LISTED]:
        yield f"gradient of {pattern} off by {error:.2g} of its largest element"
    if errors and len(errors) > _LISTED:
        yield f"and {len(errors) - _LISTED} more"


def summarize(results: list[RankResult], seconds: float = 0.0) -> Outcome:
    """Return the outcome that the results of all ranks amount to."""
    found = list(_mismatches(results))
    note = "; ".join(found[:_LISTED]) + (f"; and {len(found) - _LISTED} more" if found[_LISTED:] else "")
    reached, whole = results[0].reached, results[0].whole
    shares = {pattern: size / reached for pattern, size in sorted(whole.items(), key=lambda item: -item[1])}
    return Outcome("wrong" if found else "right", note, 1 - sum(shares.values()), shares, seconds)


def _mismatches(results: list[RankResult]) -> Iterator[str]:
    """Yield mismatches in the order of set-up, forward and backward; one that ranks share is listed once."""
    seen: set[str] = set()

    def new(key: str) -> bool:
        return key not in seen and not seen.add(key)  # type: ignore[func-returns-value]

    for result in results:
        yield from filter(new, result.problems)
    for rank, result in enumerate(results):
        for kind, error in result.output_errors.items():
            if not error <= OUTPUT_BOUND and new(kind):
                yield f"rank {rank}: output off by {error:.1e} ({kind})"
    for rank, result in enumerate(results):
        for path, error in result.gradient_errors.items():
            if not error <= GRADIENT_BOUND and new(path):
                yield f"rank {rank}: gradient of {path} off by {error:.1e}"


def failure(failed: RanksFailed, seconds: float) -> Outcome:
    error = min((error for _, error in sorted(failed.errors.items())), key=_consequence)
    match error.type_name:
        case "Refused":
            return Outcome("refused", error.message, seconds=seconds)
        case "Stranded":
            return Outcome("hung", error.message, seconds=seconds)
        case _:
            return Outcome("failed", f"{error.type_name}: {error.message} ({_place(error)})", seconds=seconds)


def _consequence(error: RankError) -> int:
    """Return how likely an error follows from another rank's error, which is then reported instead."""
    return 2 if error.type_name in ("Stranded", "Died") else int("gloo" in error.message)


def _place(error: RankError) -> str:
    """Return the innermost lines of model code, or of ours, in an error's traceback."""
    frames = [line.split('"') for line in error.traceback.splitlines() if line.startswith("  File")]
    known = [frame for frame in frames if any(name in frame[1] for name in ("/models/", "/remote_code", "tp_plans"))]
    parts = [f"{frame[1].rpartition('/')[2]}{frame[2].rpartition(' in ')[0]}" for frame in (known or frames)[-3:]]
    return " < ".join(reversed(parts))
