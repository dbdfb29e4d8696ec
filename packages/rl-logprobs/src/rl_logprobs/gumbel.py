"""Noise for sampling that depends on nothing but a seed, a token's place and a vocabulary id.

A hash of the three replaces a generator's state, so that a rank draws exactly the numbers of its own columns:
every rank, and every number of ranks, sees the same noise.  The hash is SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), with one stream a token.
"""

from __future__ import annotations

import torch

from rl_logprobs.rows import wide_dtype

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def token_keys(seed: int, places: torch.Tensor) -> torch.Tensor:
    """One key a token, int64, from a seed and the tokens' places in the batch."""
    start = _mix_(torch.tensor(_signed(seed), device=places.device))
    return _mix_(places * _signed(_GOLDEN) + start)


def gumbel_noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise ``[tokens, ids]`` in the widest dtype of the device.

    Args:
        keys: ``[tokens]`` int64, see ``token_keys``.
        ids: ``[ids]`` int64 vocabulary ids.
    """
    dtype = wide_dtype(keys.device)
    bits = 52 if dtype is torch.float64 else 23  # with a half added they still fit the mantissa, and never give 0 or 1
    hashed = _mix_(keys[:, None] + (ids + 1) * _signed(_GOLDEN))
    uniform = _shifted(hashed, 64 - bits).to(dtype).add_(0.5).mul_(2.0**-bits)
    return uniform.log_().neg_().log_().neg_()


def _mix_(values: torch.Tensor) -> torch.Tensor:
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        values.bitwise_xor_(_shifted(values, shift)).mul_(_signed(multiplier))
    return values


def _shifted(values: torch.Tensor, places: int) -> torch.Tensor:
    """Shift right and fill with zeros, where torch's own shift repeats the sign."""
    return (values >> places) & ((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of ``value``."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
