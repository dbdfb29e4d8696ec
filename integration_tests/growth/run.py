"""Measure how public calls grow, print a table, fail on what is too steep: ``python -m growth.run [--only REGEX]``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

import torch

from growth.cases import CASES
from growth.measure import QUANTITIES, Growth, grow

_ROW = "{:58} {:>13} {:>8} {:>5} {:>7} {:>5} {:>9} {:>5}"
HEAD = _ROW.format("call: what grows", "sizes", "seconds", "slope", "MiB", "slope", "calls", "slope")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row a case; 1 where a slope exceeds what the case allows."""
    parser = argparse.ArgumentParser(prog="growth.run", description=__doc__.partition(":")[0])
    parser.add_argument("--only", default="", help="a regular expression for the names of cases")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [case for case in CASES if re.search(options.only, case.name)]
    _say(HEAD)
    steep: list[Growth] = []
    for case in chosen:
        found = grow(case)
        _say(_line(found))
        steep += [found] if found.too_steep() else []
    for found in steep:
        _say(f"{found.case.name}\n{_details(found)}")
    _say(f"{len(chosen)} calls, {len(steep)} grow faster than their algorithm needs")
    return int(bool(steep) or not chosen)


def _line(found: Growth) -> str:
    sizes = f"{found.case.sizes[0]}-{found.case.sizes[-1]}"
    taken, memory, calls = (found.costs[quantity][-1] for quantity in QUANTITIES)
    slopes = [f"{found.slope(quantity):.2f}" for quantity in QUANTITIES]
    totals = [f"{taken:.3f}", f"{memory / 2**20:.1f}", f"{calls:.0f}"]
    cells = (cell for pair in zip(totals, slopes, strict=True) for cell in pair)
    return f"{_ROW.format(found.case.name, sizes, *cells)}  {', '.join(found.too_steep())}".rstrip()


def _details(found: Growth) -> str:
    return "\n".join(
        f"  {quantity}: slope {found.slope(quantity):.2f}, allowed {found.case.allowed(quantity):.2f}: "
        + ", ".join(
            f"{value:.4g} at {size}" for size, value in zip(found.case.sizes, found.costs[quantity], strict=True)
        )
        for quantity in found.too_steep()
    )


def _say(text: str) -> None:
    sys.stdout.write(text + os.linesep)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
