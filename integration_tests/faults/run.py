"""Try every fault and print what became of it: ``python -m faults.run [--only REGEX] [--timeout SECONDS]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from faults.campaign import Campaign, Row
from faults.writers import campaign as writers_campaign

HEAD = f"{'fault':52} {'others ended after':>18} {'resumed from':>12} {'data lost':>9}  survived"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; 1 where a fault was not survived."""
    parser = argparse.ArgumentParser(prog="faults.run", description=__doc__.partition(":")[0])
    parser.add_argument("--only", default="", help="a regular expression for the names of faults")
    parser.add_argument("--timeout", type=float, default=10.0, help="of monitor_ranks; the bound is twice that")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="for the ranks that are struck")
    parser.add_argument("--writers", type=float, default=20.0, help="seconds of eight jobs in one directory, each kind")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        campaign = Campaign(Path(directory), timeout=options.timeout, seed=options.seed)
        _say(f"four ranks, dp_shard=2 x tp=2; bound {campaign.bound:g} s; seed {options.seed}\n{HEAD}")
        try:
            for row in campaign.run(options.only):
                rows.append(row)
                _say(_line(row))
        except PermissionError as error:
            _say(f"full disk during save: not tried, for mounting a small one needs root ({error})")
        lossy = writers_campaign(Path(directory), seconds=options.writers, seed=options.seed) if options.writers else []
    survived = sum(not row.problems for row in rows)
    lost = sum(row.lost for row in rows)
    _say(f"{len(rows)} faults tried, {survived} survived, data lost: {f'{lost} steps' if lost else 'none'}")
    for problem in lossy:
        _say(problem)
    return int(survived < len(rows) or not rows or bool(lossy))


def _line(row: Row) -> str:
    lost = f"{row.lost} steps" if row.lost else "none"
    line = (
        f"{row.fault:52} {row.seconds:16.1f} s {f'step {row.resumed}':>12} {lost:>9}  {'no' if row.problems else 'yes'}"
    )
    return "\n    ".join([line, *row.problems])


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
