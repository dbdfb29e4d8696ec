"""Clocks for the benchmarks: contenders take turns, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Step = Callable[[], Any]


def take_turns(steps: Mapping[str, tuple[Step, Callable[[Any], Any]]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in every round; a step prepares without being timed, then runs."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-1, rounds):  # the first round only warms up
        for name, (prepare, run) in steps.items():
            prepared = prepare()
            gc.collect()
            start = time.perf_counter()
            run(prepared)
            if number >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def table(title: str, times: Mapping[str, list[float]], naive: str | None, bound: str) -> None:
    """Print one line a contender; ratios are the median over the rounds against the naive one."""
    print(f"\n{title}; to hold: {bound}")
    print(f"  {'':44} {'median ms':>10} {'best ms':>8} {'ratio':>6}")
    for name, seconds in times.items():
        ratio = ""
        if naive is not None:
            rounds = zip(seconds, times[naive], strict=True)
            ratio = f"{statistics.median(mine / other for mine, other in rounds):.2f}"
        print(f"  {name:44} {statistics.median(seconds) * 1e3:10.1f} {min(seconds) * 1e3:8.1f} {ratio:>6}")
