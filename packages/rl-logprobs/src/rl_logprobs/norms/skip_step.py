"""Decide, without waiting for the device, which optimizer steps to skip."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

from rl_logprobs.errors import DtypeError, OptionError


def should_skip_step(total_norm: torch.Tensor, *, max_norm: float = math.inf) -> torch.Tensor:
    """Return whether to skip an optimizer step with gradients of this norm, as a tensor: the host does not wait.

    ``if should_skip_step(norm): optimizer.zero_grad()`` waits for the norm, and every rank decides the same, because
    all have the same norm.  A fused optimizer can skip on the device, as with torch's gradient scaler:
    ``optimizer.found_inf = should_skip_step(norm).float()``.  Clipping by a norm that is not finite leaves NaN in the
    gradients, so clear them before the next backward pass.

    Args:
        total_norm: norm from ``grad_norm`` or ``clip_grad_norm_``; any shape, such as the stacked norms of groups.
        max_norm: also skip steps with a larger norm than this, which may come from a bad batch.

    Returns:
        0-d bool on the norm's device: true if any norm is infinite, NaN or above ``max_norm``.

    Raises:
        OptionError: ``max_norm`` is not positive.
        DtypeError: the norm is complex or sparse.

    Example:
        >>> import torch
        >>> from rl_logprobs import should_skip_step
        >>> should_skip_step(torch.tensor(3.0)), should_skip_step(torch.tensor(3.0), max_norm=2.0)
        (tensor(False), tensor(True))
    """
    if not max_norm > 0:
        raise OptionError(f"max_norm must be positive, got {max_norm}; leave it out to skip only non-finite norms")
    if total_norm.is_complex() or total_norm.layout is not torch.strided:
        raise DtypeError(f"total_norm must be real and dense, got {total_norm.dtype} {total_norm.layout}")
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    return ~(norm.isfinite() & (norm <= float(max_norm))).all()
