"""Measure a call at several sizes: time, peak memory, calls of functions, and the slopes of all three in log-log."""

from __future__ import annotations

import gc
import math
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from harness.memory import LiveBytes

#: A function to measure, or a context that has one.
Prepared = Callable[[], Any] | AbstractContextManager[Callable[[], Any]]
#: Slopes are those of the last sizes, where what is the same for every size counts least.
LAST = 3
#: What n log n, a busy machine and costs that are the same for every size add to a slope.
TOLERANCE = {"seconds": 0.35, "memory": 0.2, "calls": 0.2}
#: Totals at the largest size below which a slope says nothing.
NEGLIGIBLE = {"seconds": 0.004, "memory": 2**18, "calls": 500}


@dataclass(frozen=True)
class Case:
    """A call whose cost is measured as something grows.

    Args:
        name: the call, and what grows.
        sizes: about two decades, ascending.
        make: returns the call for a size, or a context that has it; only the call itself is measured.
        slope: the slope in log-log of time and calls that the algorithm needs.
        memory: that of the peak memory.
    """

    name: str
    sizes: Sequence[int]
    make: Callable[[int], Prepared]
    slope: float = 1.0
    memory: float = 1.0

    def allowed(self, quantity: str) -> float:
        """The largest slope of a quantity that passes."""
        return (self.memory if quantity == "memory" else self.slope) + TOLERANCE[quantity]


@dataclass(frozen=True)
class Growth:
    """What a case cost at each of its sizes: seconds of the processor, peak bytes, and calls of functions."""

    case: Case
    costs: dict[str, list[float]]

    def slope(self, quantity: str) -> float:
        """The slope in log-log over the last sizes; 0 where the cost is negligible."""
        values = self.costs[quantity]
        if values[-1] < NEGLIGIBLE[quantity]:
            return 0.0
        return slope(self.case.sizes[-LAST:], values[-LAST:])

    def too_steep(self) -> list[str]:
        """The quantities that grow faster than the case allows."""
        return [quantity for quantity in self.costs if self.slope(quantity) > self.case.allowed(quantity)]


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the least-squares line through the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(max(value, 1e-9)) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def grow(case: Case) -> Growth:
    """Measure a case; a time that grows too fast is measured once more, as other processes may have caused it."""
    found = Growth(case, {name: [run(case, size) for size in case.sizes] for name, run in QUANTITIES.items()})
    if found.slope("seconds") > case.allowed("seconds"):
        again = [seconds(case, size) for size in case.sizes]
        found.costs["seconds"] = [min(pair) for pair in zip(found.costs["seconds"], again, strict=True)]
    return found


def seconds(case: Case, size: int) -> float:
    """The least time of the processor of three runs, each of a new call; fewer if they take over half a second."""
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < 0.5:
        with _prepared(case, size) as call:
            gc.collect()
            gc.disable()
            try:
                begun = time.process_time()
                call()
                taken.append(time.process_time() - begun)
            finally:
                gc.enable()
    return min(taken)


def peak_memory(case: Case, size: int) -> float:
    """The peak of the bytes that Python's objects and torch's tensors take during the call."""
    with _prepared(case, size) as call:
        tracemalloc.start()
        try:
            with LiveBytes() as tensors:
                kept = call()
            python = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        del kept
    return float(python + tensors.peak)


def calls(case: Case, size: int) -> float:
    """The functions called, those written in C included; the same number on any machine."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with _prepared(case, size) as call:
        gc.collect()
        gc.disable()
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
            gc.enable()
    return float(count)


QUANTITIES: dict[str, Callable[[Case, int], float]] = {"seconds": seconds, "memory": peak_memory, "calls": calls}


@contextmanager
def _prepared(case: Case, size: int) -> Iterator[Callable[[], Any]]:
    made = case.make(size)
    if isinstance(made, AbstractContextManager):
        with made as call:
            yield call
    else:
        yield made
