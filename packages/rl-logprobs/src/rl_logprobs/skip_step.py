"""Leaving out the optimizer steps that would do harm."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

from rl_logprobs.errors import OptionError


def must_skip_step(total_norm: torch.Tensor, *, limit: float = math.inf) -> torch.Tensor:
    """Whether an optimizer step with gradients of this norm must be left out; the host does not wait for it.

    ``if must_skip_step(norm): optimizer.zero_grad()`` waits, and every rank decides alike, because the norm is the
    same on all.  Nothing waits if a fused optimizer is told on the device, as torch's gradient scaler does it:
    ``optimizer.found_inf = must_skip_step(norm).float()``.  Clipping by a norm that is not finite leaves NaN in the
    gradients, so clear them before the next backward pass.

    Args:
        total_norm: from ``grad_norm`` or ``clip_grad_norm_``; any shape, such as the stacked norms of groups.
        limit: also skip norms above this one, which some recipes take for a sign of a bad batch.

    Returns:
        0-d bool on the norm's device: true if any of them is infinite, NaN or above ``limit``.

    Raises:
        OptionError: ``limit`` is not positive.
    """
    if not limit > 0:
        raise OptionError(f"limit must be positive, got {limit}; leave it out to skip only what is not finite")
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    return ~(norm.isfinite() & (norm <= limit)).all()
