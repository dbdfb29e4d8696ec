"""Dtypes of intermediate results: wider than the inputs, so that sums over a vocabulary stay exact to rounding."""

from __future__ import annotations

import torch


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a softmax over ``dtype`` is summed: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for per-token sums across ranks: float64, or float32 on devices without float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_integral(dtype: torch.dtype) -> bool:
    """Return whether a dtype is an integer dtype; bool is not."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
