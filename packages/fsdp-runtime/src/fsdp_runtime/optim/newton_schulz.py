"""The orthogonalization of a matrix by Newton-Schulz iterations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: The coefficients of Keller Jordan's quintic iteration (https://kellerjordan.github.io/posts/muon/).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1, in its dtype."""
    # The operators and their order are torch.optim.Muon's, so that equal inputs give equal bits.
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def iteration_flops(rows: int, columns: int, steps: int) -> int:
    """Return the operations of :func:`orthogonalize`."""
    low, high = sorted((rows, columns))
    return steps * (4 * low * low * high + 2 * low**3)


def update_scale(rows: int, columns: int, method: str | None) -> float:
    """Return the factor of the learning rate for a matrix ``[out, in]``, as in ``torch.optim.Muon``."""
    if method == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
