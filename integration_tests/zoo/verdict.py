"""From what the ranks found, or how they failed, to one verdict a row and mode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.parity import GRADIENT_BOUND, OUTPUT_BOUND
from harness.ranks import RankError, RankPool, RanksFailed
from zoo.measure import RankResult, measure

#: How many faults a note names.
_TOLD = 6


@dataclass(frozen=True)
class Verdict:
    """What came of one architecture in one mode.

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


def verdict(pool: RankPool, name: str, mode: str, *, kinds: tuple[str, ...], timeout: float) -> Verdict:
    """Measure one architecture in one mode, whatever happens."""
    start = time.monotonic()
    try:
        results = pool.run(measure, name, mode, tp=pool.world_size, kinds=kinds, timeout=timeout)
    except RanksFailed as failed:
        return _failure(failed, time.monotonic() - start)
    return judged(results, time.monotonic() - start)


def judged(results: list[RankResult], seconds: float = 0.0) -> Verdict:
    """The verdict on what all ranks found."""
    faults = list(_faults(results))
    told = "; ".join(faults[:_TOLD]) + (f"; and {len(faults) - _TOLD} more" if faults[_TOLD:] else "")
    reached, whole = results[0].reached, results[0].whole
    shares = {pattern: size / reached for pattern, size in sorted(whole.items(), key=lambda item: -item[1])}
    return Verdict("wrong" if faults else "right", told, 1 - sum(shares.values()), shares, seconds)


def _faults(results: list[RankResult]) -> Iterator[str]:
    """Faults in the order of setting up, forward and backward; one that several ranks share is told once."""
    told: set[str] = set()

    def new(key: str) -> bool:
        return key not in told and not told.add(key)  # type: ignore[func-returns-value]

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


def _failure(failed: RanksFailed, seconds: float) -> Verdict:
    error = min((error for _, error in sorted(failed.errors.items())), key=_consequence)
    match error.type_name:
        case "Refused":
            return Verdict("refused", error.message, seconds=seconds)
        case "Stranded":
            return Verdict("hung", error.message, seconds=seconds)
        case _:
            return Verdict("failed", f"{error.type_name}: {error.message} ({_place(error)})", seconds=seconds)


def _consequence(error: RankError) -> int:
    """How likely an error is but the consequence of another rank's: that other one is told."""
    return 2 if error.type_name in ("Stranded", "Died") else int("gloo" in error.message)


def _place(error: RankError) -> str:
    """The innermost lines of model code, or of ours, that an error came through."""
    frames = [line.split('"') for line in error.traceback.splitlines() if line.startswith("  File")]
    known = [frame for frame in frames if any(name in frame[1] for name in ("/models/", "/stand_in", "tp_plans"))]
    parts = [f"{frame[1].rpartition('/')[2]}{frame[2].rpartition(' in ')[0]}" for frame in (known or frames)[-3:]]
    return " < ".join(reversed(parts))
