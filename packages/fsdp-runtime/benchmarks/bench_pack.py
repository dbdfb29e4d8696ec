"""Imbalance of packed rows against a lower bound, the optimum and first fit, on long-tailed lengths.

The imbalance is the share by which a step (the sum over micro-batches of the rank with the most work) exceeds the
total work divided by the ranks, which is a lower bound and not always attainable.

Then rows, balance and times of larger and larger batches, beside the least number of micro-batches that any packing
has, first fit, longest first, and Karmarkar and Karp's partition into as many rows, which looks at no budget (both of
few samples only).  A slope of 1 is a time that grows as the samples.

python packages/fsdp-runtime/benchmarks/bench_pack.py [BATCHES]
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from fsdp_runtime.batching import pack, pack_tree
from fsdp_runtime.batching.balance import Items, Row, _differencing, assign_rows, least_rows, lower_bound, step_work

#: Samples, data-parallel ranks and tokens a row of each setting.
SETTINGS = ((64, 4, 8192), (256, 8, 16384), (512, 16, 16384))
#: Tokens a row and data-parallel ranks of the batches that grow, and the numbers of their samples.
LARGE = ((8192, 8), (131072, 8), (8192, 256), (131072, 256))
COUNTS = (2000, 10_000, 100_000)
#: First fit and the partition take a time that grows as the square of the samples.
_FEW = 2000
#: For a hidden size of 2048, at which attention to 8192 tokens costs a third of the other work.
PAIR_COST = 1 / (6 * 2048)


def lengths(count: int, longest: int, seed: int) -> list[int]:
    """Log-normal lengths with a median of 665 tokens, as responses of a reasoning model have."""
    draw = random.Random(seed)
    return [min(longest, max(16, int(draw.lognormvariate(6.5, 1.0)))) for _ in range(count)]


def items_of(tokens: list[int], capacity: int) -> Items:
    """Lengths with their work."""
    return Items(tokens, [n + PAIR_COST * n * (n + 1) / 2 for n in tokens], capacity)


def first_fit(items: Items, ranks: int, order: Sequence[int]) -> list[list[Row]]:
    """Each item to the first row with room, rows to the ranks in turn."""
    rows: list[Row] = []
    for item in order:
        fitting = (row for row in rows if items.tokens_of(row) + items.tokens[item] <= items.capacity)
        row = next(fitting, None)
        if row is None:
            rows.append(row := [])
        row.append(item)
    rows += [[] for _ in range(-len(rows) % ranks)]
    return [rows[start : start + ranks] for start in range(0, len(rows), ranks)]


def least_work(items: Items, rows: int) -> float:
    """The optimum of one micro-batch, by trying every assignment."""
    best = float("inf")
    for choice in itertools.product(range(rows), repeat=len(items.tokens) - 1):
        work, tokens = [0.0] * rows, [0] * rows
        for item, row in enumerate((0, *choice)):
            work[row] += items.work[item]
            tokens[row] += items.tokens[item]
        if max(tokens) <= items.capacity:
            best = min(best, max(work))
    return best


def print_row(name: str, found: Sequence[float]) -> None:
    """Print the mean, the 95th percentile and the largest of some imbalances."""
    ordered = sorted(found)
    mean, high = statistics.fmean(ordered), ordered[int(0.95 * (len(ordered) - 1))]
    print(f"  {name:28} mean {mean:7.2%}   95th percentile {high:7.2%}   largest {ordered[-1]:7.2%}")


def main(batches: int) -> None:
    """Print the imbalances of random batches, and of small ones beside the optimum."""
    for count, ranks, capacity in SETTINGS:
        found: dict[str, list[float]] = {"pack": [], "first fit": [], "first fit, longest first": []}
        seconds = 0.0
        for seed in range(batches):
            tokens = lengths(count, capacity, seed)
            items = items_of(tokens, capacity)
            bound = lower_bound(items, ranks)
            start = time.perf_counter()
            packed = assign_rows(items, ranks)
            seconds += time.perf_counter() - start
            by_length = sorted(range(count), key=lambda item: -tokens[item])
            others = [packed, first_fit(items, ranks, range(count)), first_fit(items, ranks, by_length)]
            for name, each in zip(found, others, strict=True):
                found[name].append(step_work(items, each) / bound - 1)
        print(f"{batches} batches of {count} samples, {ranks} ranks, rows of {capacity} tokens")
        for name, each in found.items():
            print_row(name, each)
        print(f"  pack takes {seconds / batches * 1e3:.1f} ms a batch")
    small: dict[str, list[float]] = {"pack": [], "first fit": [], "first fit, longest first": []}
    for seed in range(batches // 5):
        tokens = lengths(8, 4096, seed)
        items = items_of(tokens, 8192)
        best = least_work(items, 3)
        orders = range(8), sorted(range(8), key=lambda item: -tokens[item])
        for name, each in zip(small, [assign_rows(items, 3), *(first_fit(items, 3, o) for o in orders)], strict=True):
            small[name].append(step_work(items, each) / best - 1)
    print(f"{batches // 5} batches of 8 samples on 3 ranks, against the optimum")
    for name, each in small.items():
        print_row(name, each)


def by_differencing(items: Items, ranks: int, micro_batches: int) -> list[list[Row]]:
    """Karmarkar and Karp's partition, the rows of about the same work in one micro-batch."""
    order = sorted(range(len(items.tokens)), key=lambda item: (-items.work[item], item))
    rows = sorted(_differencing(items, order, ranks * micro_batches), key=items.work_of, reverse=True)
    return [rows[start : start + ranks] for start in range(0, len(rows), ranks)]


def imbalance(items: Items, ranks: int, found: Sequence[Sequence[Row]]) -> str:
    """The number of micro-batches and the imbalance."""
    return f"{len(found)} ({step_work(items, found) / lower_bound(items, ranks) - 1:.3%})"


def grow(capacity: int, ranks: int) -> None:
    """Print micro-batches, imbalances and times of batches of more and more samples."""
    print(f"rows of {capacity} tokens, {ranks} ranks: micro-batches (imbalance)")
    seconds: dict[str, list[float]] = {"pack": [], "pack_tree": []}
    for previous, count in itertools.pairwise((0, *COUNTS)):
        tokens = lengths(count, capacity, 0)
        ids = torch.arange(capacity)
        samples = [ids[:length] + index for index, length in enumerate(tokens)]
        start = time.process_time()
        packing = pack(samples, capacity, ranks=ranks, pair_cost=PAIR_COST)
        seconds["pack"].append(time.process_time() - start)
        groups = [[torch.cat([sample, sample[:1] + turn])[-capacity:] for turn in range(4)] for sample in samples[::4]]
        start = time.process_time()
        pack_tree(groups, capacity, ranks=ranks, pair_cost=PAIR_COST)
        seconds["pack_tree"].append(time.process_time() - start)
        items = items_of(tokens, capacity)
        found = [[list(row) for row in rows] for rows in packing.assignment]
        line = f"  {count:7} samples: pack {imbalance(items, ranks, found)}, bound {-(-least_rows(items) // ranks)}"
        if count <= _FEW:
            order = sorted(range(count), key=lambda item: -tokens[item])
            line += f", first fit {imbalance(items, ranks, first_fit(items, ranks, order))}"
            line += f", differencing {imbalance(items, ranks, by_differencing(items, ranks, len(found)))}"
        for name, taken in seconds.items():
            slope = f", slope {math.log(taken[-1] / taken[-2]) / math.log(count / previous):.2f}" if taken[1:] else ""
            line += f"; {name} {taken[-1]:.2f} s{slope}"
        print(line, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    for each in LARGE:
        grow(*each)
