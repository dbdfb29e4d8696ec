"""Tests of the division of blocks into stages."""

from __future__ import annotations

import itertools
import random

import pytest

from fsdp_runtime._torch_compat import merged_parameter_groups
from fsdp_runtime.steps import Pipeline
from fsdp_runtime.steps.pipeline.step import ranges_of, split_blocks


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


@pytest.mark.parametrize(
    ("schedule", "microbatches", "expected"),
    [
        ("1F1B", 4, "1F1B"),
        ("1F1B", 1, "GPipe"),
        ("Interleaved1F1B", 6, "Interleaved1F1B"),
        ("Interleaved1F1B", 5, "LoopedBFS"),
        ("DualPipeV", 4, "DualPipeV"),
        ("DualPipeV", 3, "ZBVZeroBubble"),
    ],
)
def test_schedule_of_takes_any_number_of_micro_batches(schedule: str, microbatches: int, expected: str) -> None:
    assert Pipeline(schedule, microbatches=4).schedule_of(microbatches, pp=2) == expected


def test_merged_parameter_groups_have_each_parameter_and_node_once() -> None:
    groups = [
        {"params": {"key"}, "intermediates": ["a", "b"], "grads": [1, None]},
        {"params": {"key", "value"}, "intermediates": ["a", "c"], "grads": [1, 2]},
        {"params": {"unused"}, "intermediates": ["d"]},
    ]
    (merged,) = merged_parameter_groups(groups)
    assert set(merged["params"]) == {"key", "value"}
    assert dict(zip(merged["intermediates"], merged["grads"], strict=True)) == {"a": 1, "c": 2}
    assert merged_parameter_groups([]) == []
