"""The layout in which peft keeps the low-rank adapters of stacked experts."""

from __future__ import annotations

from torch import Tensor


def by_expert(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the factors ``[experts, rank, in]`` and ``[experts, out, rank]`` of each expert.

    ``a`` is ``[experts * rank, in]``, ``b`` is ``[out, rank * experts]``, with the experts innermost.
    """
    return a.view(experts, -1, a.shape[-1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
