"""Run every architecture with tensor and with sequence parallelism, and record which are right.

A failure, crash or hang costs its own row only.  Every row is on disk as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from harness.parity import GRADIENT_BOUND, OUTPUT_BOUND
from harness.ranks import RankPool, RanksFailed
from zoo.measure import KINDS, RankResult, measure
from zoo.table import entries


@dataclass(frozen=True)
class Verdict:
    """What came of one architecture in one mode.

    Args:
        status: ``"right"``, ``"wrong"``, ``"refused"``, ``"failed"`` (it raised) or ``"hung"``.
        note: why, where it is not right.
        share: the share of the reached parameter bytes that is split over the axis.
        whole: the patterns that every rank holds whole, with their shares, largest first.
        seconds: what it took.
    """

    status: str
    note: str = ""
    share: float | None = None
    whole: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def judged(results: list[RankResult], seconds: float) -> Verdict:
    """The verdict on what all ranks found."""
    faults = list(_faults(results))
    first = results[0]
    shares = {pattern: size / first.reached for pattern, size in first.whole.items()}
    return Verdict(
        "wrong" if faults else "right",
        "; ".join(faults[:6]) + (f"; and {len(faults) - 6} more" if faults[6:] else ""),
        1 - sum(shares.values()),
        dict(sorted(shares.items(), key=lambda item: -item[1])),
        seconds,
    )


def _faults(results: list[RankResult]) -> Iterator[str]:
    """Faults in the order of forward, then backward; one that all ranks share is told once."""
    told: set[str] = set()
    for rank, result in enumerate(results):
        for problem in result.problems:
            if problem not in told:
                told.add(problem)
                yield problem
        for kind, error in result.output_errors.items():
            if not error <= OUTPUT_BOUND and kind not in told:
                told.add(kind)
                yield f"rank {rank}: output off by {error:.1e} ({kind})"
    for rank, result in enumerate(results):
        for path, error in result.gradient_errors.items():
            if not error <= GRADIENT_BOUND and path not in told:
                told.add(path)
                yield f"rank {rank}: gradient of {path} off by {error:.1e}"


def verdict(pool: RankPool, name: str, mode: str, *, kinds: tuple[str, ...], timeout: float) -> Verdict:
    """Measure one architecture in one mode, whatever happens."""
    start = time.monotonic()
    try:
        results = pool.run(measure, name, mode, tp=pool.world_size, kinds=kinds, timeout=timeout)
    except RanksFailed as failed:
        seconds = time.monotonic() - start
        errors = [error for _, error in sorted(failed.errors.items())]
        error = next((e for e in errors if e.type_name not in ("Stranded", "Died")), errors[0])
        if error.type_name == "Refused":
            return Verdict("refused", error.message, seconds=seconds)
        if error.type_name == "Stranded":
            return Verdict("hung", error.message, seconds=seconds)
        where = [line.strip() for line in error.traceback.splitlines() if line.startswith("  File")][-4:]
        return Verdict("failed", f"{error.type_name}: {error.message} @ {' < '.join(reversed(where))}", seconds=seconds)
    return judged(results, time.monotonic() - start)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--modes", default="TP,SP")
    parser.add_argument("--kinds", default="ids,positions")
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    rows: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    names = [name for name in entries() if any(fnmatchcase(name, pattern) for pattern in options.patterns)]
    pool = RankPool(options.tp)
    kinds = tuple(KINDS) if options.kinds == "all" else tuple(options.kinds.split(","))
    try:
        for done, name in enumerate(names, 1):
            row = rows.setdefault(name, {})
            for mode in options.modes.split(","):
                found = verdict(pool, name, mode, kinds=kinds, timeout=options.timeout)
                row[mode] = asdict(found)
                share = "" if found.share is None else f"{found.share:4.0%}"
                line = f"[{done}/{len(names)}] {name} {mode} {found.status} {share} {found.seconds:.1f}s {found.note[:200]}"
                sys.stdout.write(line.replace("\n", " ") + "\n")
                sys.stdout.flush()
            options.output.write_text(json.dumps(rows, indent=1))
    finally:
        pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
