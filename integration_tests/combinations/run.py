"""Draw cases, run them on ranks, and shrink those that fail (``nox -s soak -- combinations --help``)."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from random import Random

from combinations.cases import Case, crowded, mixed
from combinations.events import Wrong
from combinations.field_results import measure_change
from combinations.fields import FieldCase, field_cases
from combinations.mutants import run_planted
from combinations.scenario import ALONE, FAILED, REFUSED, RIGHT, Result
from coverage.measure import warm_up
from harness.ranks import RankPool, RanksFailed

#: A case that takes longer hangs.  A rank that waits for another gives up itself after 150 seconds, and says so, while
#: compiled mixtures take minutes on a busy machine.
SECONDS = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases for a given time; 1 where one fails, or none was run."""
    options = _options(arguments)
    random = Random(options.seed)
    counts: Counter[str] = Counter()
    pool = RankPool(options.ranks)
    try:
        pool.run(quiet, timeout=600)
        given = [_parsed(text) for text in options.case]
        started = time.monotonic()
        for case in given or _drawn(options, random):
            if not given and time.monotonic() - started > 60 * options.minutes:
                break
            result = outcome(pool, case, options.mutant)
            counts[result.outcome] += 1
            if result.outcome == FAILED and not given and isinstance(case, Case):
                case, result = shrunk(pool, case, result, options.mutant)
            if given or result.outcome == FAILED or (options.verbose and result.outcome != RIGHT):
                _say(f"{result.outcome}: {result.detail}\n    --ranks {options.ranks} --case '{case.to_json()}'")
    finally:
        pool.close(force=True)
    _say(", ".join(f"{counts[name]} {name}" for name in (RIGHT, REFUSED, ALONE, FAILED)))
    return int(bool(counts[FAILED]) or not counts)


def quiet() -> None:
    """Import what every case needs, and silence warnings of the models' own code."""
    warm_up()
    warnings.filterwarnings("ignore")
    for package in ("fsdp_runtime", "tp_plans"):
        logging.getLogger(package).setLevel(logging.ERROR)


def outcome(pool: RankPool, case: Case | FieldCase, mutant: str = "") -> Result:
    """Run a case on all ranks; it is right where it is on each."""
    call = partial(measure_change, case) if isinstance(case, FieldCase) else partial(run_planted, case, mutant)
    try:
        results = pool.run(call, timeout=SECONDS)
    except RanksFailed as failed:
        pool.run(warm_up, timeout=600)  # of a world that may be a new one
        numbers = all(error.type_name == Wrong.__name__ for error in failed.errors.values())
        return Result(FAILED, str(failed).partition("\n--- ")[0] if numbers else str(failed))
    if len({result.outcome for result in results}) == 1:
        return results[0]
    lines = (f"rank {rank}: {result.outcome}: {result.detail}" for rank, result in enumerate(results))
    return Result(FAILED, "\n".join(lines))


def shrunk(pool: RankPool, case: Case, result: Result, mutant: str = "") -> tuple[Case, Result]:
    """Return the smallest case that fails still, and how."""
    for smaller in case.smaller():
        found = outcome(pool, smaller, mutant)
        if found.outcome == FAILED:
            return shrunk(pool, smaller, found, mutant)
    return case, result


def _drawn(options: argparse.Namespace, random: Random) -> Iterable[Case | FieldCase]:
    if options.fields:
        return field_cases(random, options.row)
    return (crowded if options.crowded else mixed)(random, options.ranks)


def _parsed(text: str) -> Case | FieldCase:
    """Return the case of a line; the last entry of a field's case is its mode."""
    entries = json.loads(text)
    return FieldCase(*entries) if isinstance(entries[-1], str) else Case.from_json(text)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="combinations", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="how long cases are drawn (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases (default: 0)")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4), help="size of the mesh (default: 2)")
    parser.add_argument("--case", action="append", default=[], help="run this case alone, as a failure printed it")
    parser.add_argument("--mutant", default="", help="plant a defect of combinations/mutants.py")
    parser.add_argument("--crowded", action="store_true", help="draw cases of ten calls only")
    parser.add_argument("--fields", action="store_true", help="change every field of every config, one at a time")
    parser.add_argument("--row", default="", help="with --fields: one row of the coverage table")
    parser.add_argument("--verbose", action="store_true", help="print what is refused too")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
