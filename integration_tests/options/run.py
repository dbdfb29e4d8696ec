"""Change fields of configs in random order and report what fails: ``python -m options.run [--minutes N]``."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coverage.measure import warm_up
from coverage.table import UNBUILDABLE, coverage_entries
from harness.ranks import RankPool, RanksFailed
from options.changes import changed_field, changes_of
from options.measure import Outcome, measure_change

#: One case in so many is run with sequence parallelism too.
_SEQUENCE_PARALLEL = 3


@dataclass(frozen=True)
class Case:
    """One row of the coverage table, a change of one field, and a mode."""

    name: str
    change: dict[str, Any]
    mode: str

    def __str__(self) -> str:
        return f"{self.name} {changed_field(self.change)}={list(_leaf(self.change))[-1]!r} {self.mode}"

    @property
    def command(self) -> str:
        """What runs this case alone."""
        return f"nox -s soak -- fields --only '{self.name}' --change '{json.dumps(self.change)}' --mode {self.mode}"


def _leaf(change: dict[str, Any]) -> Iterator[Any]:
    for value in change.values():
        yield from value.values() if "text_config" in change else [value]


def cases(seed: int, only: str = "") -> list[Case]:
    """Return all cases in the order of a seed, or those of one row."""
    rng = random.Random(seed)
    found = []
    for name, entry in coverage_entries().items():
        if entry.model_type and name not in UNBUILDABLE and only in ("", name):
            for change in changes_of(entry):
                found += [
                    Case(name, change, mode) for mode in ("TP", *["SP"] * (rng.randrange(_SEQUENCE_PARALLEL) == 0))
                ]
    rng.shuffle(found)
    return found


def outcome(pool: RankPool, case: Case, timeout: float = 120.0) -> Outcome:
    """Return what became of a case on all ranks: the worst of what they found."""
    try:
        found = pool.run(measure_change, case.name, case.change, case.mode, timeout=timeout)
    except RanksFailed as failed:
        return Outcome("failed", str(failed)[:2000])
    if len({each.status for each in found}) > 1 and not any(each.status == "failed" for each in found):
        return Outcome("failed", f"ranks differ: {[each.status for each in found]}")
    return max(found, key=lambda each: each.status == "failed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases for a time; 1 where one has failed."""
    parser = argparse.ArgumentParser(prog="options.run", description=__doc__.partition(":")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="for the order, and the cases with SP")
    parser.add_argument("--only", default="", help="one row of the coverage table")
    parser.add_argument("--change", type=json.loads, help="further fields of its config, as JSON")
    parser.add_argument("--mode", choices=["TP", "SP"], default="TP")
    parser.add_argument("--verbose", action="store_true", help="print every case, with the reason of a refusal")
    options = parser.parse_args(arguments)
    chosen = cases(options.seed, options.only) if options.change is None else [_given(options)]
    _say(f"{len(chosen)} cases, seed {options.seed}")
    counts: Counter[str] = Counter()
    end = time.monotonic() + 60 * options.minutes
    pool = RankPool(2)
    try:
        pool.run(warm_up, timeout=600)
        for case in chosen:
            if time.monotonic() > end:
                break
            found = outcome(pool, case)
            counts[found.status] += 1
            if found.status == "failed" or options.verbose or options.change is not None:
                _say(f"{found.status}: {case}\n    {case.command}\n    {found.note.strip()}")
    finally:
        pool.close()
    _say(", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing was run")
    return int(counts["failed"] > 0 or not counts)


def _given(options: argparse.Namespace) -> Case:
    return Case(options.only, options.change, options.mode)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
