"""Gumbel noise that is a function of a seed, a token's position and a vocabulary id only.

A hash of the three replaces the state of a generator, so that a rank computes exactly its columns' numbers:
every rank sees the same noise, for every number of ranks.  The hash is SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), with one key per token.
"""

from __future__ import annotations

import torch

from rl_logprobs.tensors import wide_dtype

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def token_keys(seed: int, positions: torch.Tensor) -> torch.Tensor:
    """Return one int64 key per token, from a seed and the tokens' positions in the flattened batch."""
    start = _mix_(torch.tensor(_signed(seed), device=positions.device))
    return _mix_(positions * _signed(_GOLDEN) + start)


def gumbel_noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise ``[tokens, ids]`` of keys (``token_keys``) and ids in the device's widest dtype."""
    dtype = wide_dtype(keys.device)
    bits = 52 if dtype is torch.float64 else 23  # the mantissa still holds them with 0.5 added, and never rounds to 1
    hashed = _mix_(keys[:, None] + (ids + 1) * _signed(_GOLDEN))
    uniform = _logical_shift(hashed, 64 - bits).to(dtype).add_(0.5).mul_(2.0**-bits)
    return uniform.log_().neg_().log_().neg_()


def _mix_(values: torch.Tensor) -> torch.Tensor:
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        values.bitwise_xor_(_logical_shift(values, shift)).mul_(_signed(multiplier))
    return values


def _logical_shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's shift of signed integers repeats the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the low 64 bits of ``value``."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
