"""The layout in which peft keeps the low-rank adapters of stacked experts."""

from __future__ import annotations

from torch import Tensor


def by_expert(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the factors of each expert.

    Args:
        a: ``[experts * rank, in]``.
        b: ``[out, rank * experts]``; the experts are innermost.
        experts: their number.

    Returns:
        ``[experts, rank, in]`` and ``[experts, out, rank]``.
    """
    return a.view(experts, -1, a.shape[-1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
