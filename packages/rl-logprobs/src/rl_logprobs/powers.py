"""Logits as powers of two: the scale that makes them so, and the peak to which they are relative.

Base 2, because on a CPU a power of two costs half as much as an exponential.

Notation: ``x`` a logit, ``y = (x - peak) / T * log2(e)``, so that a column's weight is ``2**y``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from rl_logprobs.rows import wide_dtype

#: Two to a power below this is zero in float64 too; the clamp keeps ``0 * -inf`` out of the moments.
FLOOR = -1e5


class Scale(NamedTuple):
    """The temperature in base 2, for all tokens (numbers) or one by one (tensors ``[tokens]``).

    ``exponent`` turns logits into powers of two, rounded to the statistics dtype; ``nats`` turns base-2
    logarithms back and undoes that rounding; ``slope`` is ``1 / T``.
    """

    exponent: float | torch.Tensor
    nats: float | torch.Tensor
    slope: float | torch.Tensor

    @classmethod
    def of(cls, temperature: float | torch.Tensor, dtype: torch.dtype) -> Scale:
        """The scale of a positive temperature for statistics in ``dtype``."""
        if isinstance(temperature, torch.Tensor):
            wide = temperature.to(wide_dtype(temperature.device))
            exponents = (math.log2(math.e) / wide).to(dtype)
            return cls(exponents, 1 / (exponents.to(wide.dtype) * wide), 1 / wide)
        exponent = torch.tensor(math.log2(math.e) / temperature, dtype=dtype).item()
        return cls(exponent, 1 / (exponent * temperature), 1 / temperature)

    def rows(self, span: slice) -> Scale:
        """The scale of some of the tokens."""
        if isinstance(self.exponent, float):
            return self
        return Scale(*(value if isinstance(value, float) else value[span] for value in self))


def peak_lag(peak: torch.Tensor, reference: torch.Tensor, scale: Scale) -> torch.Tensor:
    """The power of two that turns weights relative to one peak into weights relative to another."""
    return ((peak - _finite(reference)) * scale.exponent).clamp(min=FLOOR)


def powers(values: torch.Tensor, peak: torch.Tensor, scale: Scale, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``y`` of logits ``[tokens, width]`` relative to ``peak``; ``-inf`` throughout for a peak of ``-inf``."""
    exponent = scale.exponent if isinstance(scale.exponent, float) else scale.exponent[:, None]
    return torch.sub(values, _finite(peak)[:, None], out=out).mul_(exponent)


def _finite(peak: torch.Tensor) -> torch.Tensor:
    """Something finite for a row that is ``-inf`` throughout, whose weights must be zero and not NaN."""
    return peak.clamp(min=torch.finfo(peak.dtype).min)
