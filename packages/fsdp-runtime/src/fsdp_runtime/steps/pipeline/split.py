"""Divide blocks into stages of about equal work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fsdp_runtime.errors import OptionError


def split_blocks(costs: Sequence[float], stages: int, *, before: float = 0, after: float = 0) -> tuple[int, ...]:
    """Return the number of blocks of each stage, with the least cost of the most expensive stage.

    Args:
        costs: of each block.
        stages: the number of stages; each gets a block.
        before: the cost of the first stage beside its blocks.
        after: the cost of the last stage beside its blocks, such as the LM head.
    """
    blocks, sums = len(costs), [0.0, *accumulate(costs)]
    if stages > blocks:
        raise OptionError(f"{stages} stages for {blocks} blocks: each stage needs a block; use fewer stages")

    def cost(stage: int, start: int, end: int) -> float:
        ends = (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)
        return sums[end] - sums[start] + ends

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
