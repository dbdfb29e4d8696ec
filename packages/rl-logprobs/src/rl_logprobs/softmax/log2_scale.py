"""Temperature, and logits as powers of two.

Base 2, because on a CPU ``exp2`` costs half as much as ``exp``.

Notation: ``x`` is a logit, ``y = (x - max_logit) / T * log2(e)`` its exponent, and ``2**y`` its weight in the softmax.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from rl_logprobs.errors import OptionError, ShapeError
from rl_logprobs.tensors import fails, wide_dtype

#: ``2**y`` of a lower exponent is 0 in float64 too; clamping to it keeps ``0 * -inf`` out of weighted sums.
MIN_EXPONENT = -1e5


class TemperatureScale(NamedTuple):
    """Factors of a temperature ``T``: numbers for all tokens, or tensors ``[tokens]``."""

    # ``log2(e) / T``, rounded to the statistics dtype: converts logit differences to exponents of two
    log2_factor: float | torch.Tensor
    ln_factor: float | torch.Tensor  # converts base-2 logarithms to nats and undoes the rounding of ``log2_factor``
    inv_temperature: float | torch.Tensor  # ``1 / T``
    temperature: float | torch.Tensor  # ``T``

    @classmethod
    def of(cls, temperature: float | torch.Tensor, dtype: torch.dtype) -> TemperatureScale:
        """Return the scale of a positive temperature for statistics in ``dtype``."""
        if isinstance(temperature, torch.Tensor):
            wide = temperature.to(wide_dtype(temperature.device))
            log2_factors = (math.log2(math.e) / wide).to(dtype)
            return cls(log2_factors, 1 / (log2_factors.to(wide.dtype) * wide), 1 / wide, temperature)
        log2_factor = torch.tensor(math.log2(math.e) / temperature, dtype=dtype).item()
        return cls(log2_factor, 1 / (log2_factor * temperature), 1 / temperature, temperature)

    def slice_tokens(self, span: slice) -> TemperatureScale:
        """Return the scale of the tokens in ``span``."""
        if isinstance(self.log2_factor, float):
            return self
        return TemperatureScale(*(value if isinstance(value, float) else value[span] for value in self))


def check_temperature(temperature: float | torch.Tensor, like: torch.Tensor) -> float | torch.Tensor:
    """Return a positive, finite temperature: a number, or a flat tensor with one value per element of ``like``."""
    if not isinstance(temperature, torch.Tensor):
        if not (temperature > 0 and math.isfinite(temperature)):
            raise OptionError(f"temperature must be positive and finite, got {temperature}")
        return float(temperature)
    try:
        flat = temperature.detach().to(like.device).expand(like.shape).reshape(-1)
    except RuntimeError as error:
        raise ShapeError(
            f"temperature of shape {tuple(temperature.shape)} does not broadcast to the targets' {tuple(like.shape)}"
        ) from error
    valid = ((flat > 0) & flat.isfinite()).all()
    if fails(valid, "temperature must be positive and finite"):
        raise OptionError(f"temperatures must be positive and finite, the least is {flat.min().item()}")
    return flat


def log2_weights(
    logits: torch.Tensor, max_logit: torch.Tensor, scale: TemperatureScale, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the exponents ``y`` of logits ``[tokens, width]`` relative to ``max_logit`` ``[tokens]``."""
    # All ``-inf`` for a token with ``max_logit`` ``-inf``.
    factor = scale.log2_factor if isinstance(scale.log2_factor, float) else scale.log2_factor[:, None]
    return torch.sub(logits, _finite(max_logit)[:, None], out=out).mul_(factor)


def rescale_exponent(max_logit: torch.Tensor, new_max: torch.Tensor, scale: TemperatureScale) -> torch.Tensor:
    """Return the exponent that converts weights relative to ``max_logit`` into weights relative to ``new_max``."""
    return ((max_logit - _finite(new_max)) * scale.log2_factor).clamp(min=MIN_EXPONENT)


def _finite(max_logit: torch.Tensor) -> torch.Tensor:
    """Replace ``-inf``, the maximum of a row of ``-inf``, so that its weights are 0 instead of NaN."""
    return max_logit.clamp(min=torch.finfo(max_logit.dtype).min)
