"""Rows of equal work: the optimum on small batches, and never worse than first fit."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_runtime.batching.balance import Items, assign_rows, best_fit, least_rows, lower_bound, step_work

lengths = st.lists(st.integers(1, 64), min_size=1, max_size=40)


def _items(tokens: list[int], capacity: int = 64) -> Items:
    return Items(tokens, [length + length**2 / 32 for length in tokens], capacity)


@given(tokens=lengths, ranks=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_every_item_is_in_one_row_and_every_rank_has_as_many_rows(tokens: list[int], ranks: int) -> None:
    items = _items(tokens)
    micro_batches = assign_rows(items, ranks)
    assert sorted(itertools.chain(*itertools.chain(*micro_batches))) == list(range(len(tokens)))
    assert {len(rows) for rows in micro_batches} == {ranks}
    assert all(items.tokens_of(row) <= items.capacity for rows in micro_batches for row in rows)
    assert step_work(items, micro_batches) >= lower_bound(items, ranks) * (1 - 1e-12)
    assert micro_batches == assign_rows(items, ranks)


def _least_work(items: Items, rows: int) -> float:
    """The optimum of one micro-batch, by trying every assignment."""
    return min(
        max(items.work_of(i for i, row in enumerate(choice) if row == wanted) for wanted in range(rows))
        for choice in itertools.product(range(rows), repeat=len(items.tokens))
        if all(
            items.tokens_of(i for i, row in enumerate(choice) if row == wanted) <= items.capacity
            for wanted in range(rows)
        )
    )


def test_small_batches_are_at_most_two_percent_above_the_optimum_on_average() -> None:
    excess = []
    for seed in range(15):
        draw = random.Random(seed)
        items = _items([min(64, max(1, int(draw.lognormvariate(2.5, 0.8)))) for _ in range(7)], capacity=160)
        found = step_work(items, assign_rows(items, 3))
        excess.append(found / _least_work(items, 3) - 1)
    assert sum(excess) / len(excess) < 0.02
    assert min(excess) > -1e-12


def test_rows_are_full_before_another_micro_batch_begins() -> None:
    # 4 rows of 10 tokens hold these exactly, as 7 + 3 and 6 + 4.
    items = _items([7, 3, 6, 4, 7, 3, 6, 4], capacity=10)
    assert len(assign_rows(items, 2)) == 2


def test_one_long_item_is_run_beside_many_short_ones() -> None:
    items = Items([100] + [10] * 20, [100.0**2] + [10.0**2] * 20, 100)
    # The long item's micro-batch can hold ten short ones on the other rank, for nothing.
    assert step_work(items, assign_rows(items, 2)) == pytest.approx(100.0**2 + 5 * 10.0**2)


@pytest.mark.parametrize("seed", range(5))
def test_long_tailed_batches_are_within_a_tenth_of_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [min(8192, int(draw.lognormvariate(6.5, 1.0))) + 1 for _ in range(128)]
    items = Items(tokens, [n + n * n / 24576 for n in tokens], 16384)
    assert step_work(items, assign_rows(items, 4)) / lower_bound(items, 4) < 1.1


class _Counted(list[float]):
    """Numbers that count how often one is read."""

    reads = 0

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        self.reads += 1
        return super().__getitem__(index)


def _reads(count: int, capacity: int, ranks: int) -> int:
    draw = random.Random(0)
    tokens = [min(capacity, max(16, int(draw.lognormvariate(6.5, 1.0)))) for _ in range(count)]
    counted, work = _Counted(tokens), _Counted(n + n * n / 49152 for n in tokens)
    assign_rows(Items(counted, work, capacity), ranks)  # type: ignore[arg-type]
    return counted.reads + work.reads


@pytest.mark.parametrize(("capacity", "ranks"), [(8192, 8), (131072, 8), (131072, 256), (8192, 256), (8192, 1)])
def test_the_steps_grow_about_as_the_samples(capacity: int, ranks: int) -> None:
    few, many = (_reads(count, capacity, ranks) for count in (4000, 16000))
    assert many < 4 * 1.6 * few
    assert many < 2000 * 16000


@given(tokens=lengths)
@settings(max_examples=100, deadline=None)
def test_the_least_number_of_rows_is_a_bound(tokens: list[int]) -> None:
    items = _items(tokens)
    rows = best_fit(items, range(len(tokens)))
    assert all(items.tokens_of(row) <= items.capacity for row in rows)
    assert -(-sum(tokens) // 64) <= least_rows(items) <= len(rows)


def test_items_that_share_no_row_are_known_to() -> None:
    assert least_rows(_items([40] * 6 + [30] * 3)) == 8
    assert least_rows(_items([33] * 5)) == 5
    assert len(assign_rows(_items([40] * 6 + [30] * 3), 2)) == 4


def test_balance_fills_micro_batches_with_one_dominant_item_beyond_the_budget() -> None:
    # 31 full rows on 3 ranks: two of the short ones' rows come beside the last.
    items = _items([64] * 31 + [1] * 20_000)
    found = assign_rows(items, 3)
    assert len(found) == -(-(31 * 64 + 20_000) // 64 // 3)
    assert step_work(items, found) <= lower_bound(items, 3) * 1.02
