"""Tests of the division of blocks into stages."""

from __future__ import annotations

import itertools
import random

import pytest

from fsdp_runtime.steps.pipeline.split import ranges_of, split_blocks


@pytest.mark.parametrize("seed", range(5))
def test_split_blocks_has_the_least_cost_of_the_most_expensive_stage(seed: int) -> None:
    draw = random.Random(seed)
    costs, before, after = [draw.randint(1, 9) for _ in range(7)], draw.randint(0, 9), draw.randint(0, 9)

    def most(counts: tuple[int, ...]) -> int:
        sums = [sum(costs[start:end]) for start, end in ranges_of(counts)]
        return max(sums[0] + before, *sums[1:-1], sums[-1] + after)

    counts = split_blocks(costs, 3, before=before, after=after)
    possible = [each for each in itertools.product(range(1, 8), repeat=3) if sum(each) == len(costs)]
    assert most(counts) == min(map(most, possible))


def test_split_blocks_of_equal_cost_has_the_fewest_bytes_in_the_largest_stage() -> None:
    costs, sizes = [1.0] * 7, [1.0, 1.0, 9.0, 9.0, 9.0, 1.0, 1.0]  # three stages of at most 3 blocks
    counts = split_blocks(costs, 3, sizes=sizes, size_after=8.0)
    assert counts == (3, 2, 2)
    assert sum(split_blocks(costs, 3, sizes=sizes, size_before=30.0)[1:]) == 6
