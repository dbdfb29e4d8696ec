"""Divide blocks into stages of about equal work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from fsdp_runtime.errors import OptionError


def split_blocks(
    costs: Sequence[float],
    stages: int,
    *,
    before: float = 0,
    after: float = 0,
    sizes: Sequence[float] = (),
    size_before: float = 0,
    size_after: float = 0,
) -> tuple[int, ...]:
    """Return the number of blocks of each stage, with the least cost of the most expensive stage."""
    # ``before`` and ``after`` are costs of the first and the last stage beside their blocks, such as the LM head. Of
    # divisions within 2 % of the least cost, the largest stage has the fewest bytes.
    if stages > len(costs):
        raise OptionError(f"{stages} stages for {len(costs)} blocks: each stage needs a block; use fewer stages")
    cost = _of_stage(costs, stages, before, after)
    counts = _least(cost, len(costs), stages)
    if not sizes:
        return counts
    limit = _SLACK * max(cost(stage, *span) for stage, span in enumerate(ranges_of(counts)))
    size = _of_stage(sizes, stages, size_before, size_after)
    return _least(lambda *stage: size(*stage) if cost(*stage) <= limit else float("inf"), len(costs), stages)


#: The cost of a stage from one block to another.
Cost = Callable[[int, int, int], float]
_SLACK = 1.02


def _of_stage(costs: Sequence[float], stages: int, before: float, after: float) -> Cost:
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        ends = (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)
        return sums[end] - sums[start] + ends

    return cost


def _least(cost: Cost, blocks: int, stages: int) -> tuple[int, ...]:
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        latest = blocks - (stages - stage - 1)
        ends = range(stage + 1, latest + 1) if stage < stages - 1 else (blocks,)
        best = {
            end: min(
                (max(most, cost(stage, start, end)), (*counts, end - start))
                for start, (most, counts) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[blocks][1]


def ranges_of(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the first block of each stage, and the first block after it."""
    ends = list(accumulate(counts))
    return tuple(zip([0, *ends], ends, strict=False))
