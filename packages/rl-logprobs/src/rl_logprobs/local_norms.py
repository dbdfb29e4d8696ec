"""Norms of this rank's tensors: accurate at any size and magnitude, with no copy of a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rl_logprobs._torch_compat import foreach_norm
from rl_logprobs.rows import wide_dtype
from rl_logprobs.stretches import stretch_norms

#: Outside these bounds squares leave the range of float32 (1e25 squared overflows, 1e-23 squared vanishes).
LEAST, LARGEST = 1e-15, 1e18


def norm_power(tensors: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Sum of ``|x| ** order`` over the tensors' elements, or their largest ``|x|`` for infinity.

    Args:
        tensors: plain floating-point tensors, empty ones allowed, on any devices.
        order: positive, or ``math.inf``.
        device: where the result goes.

    Returns:
        A 0-d tensor in float64 (float32 where the device has none).
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    powers = [_device_power(group, order).to(device) for group in by_device.values()]
    if not powers:
        return torch.zeros((), dtype=wide_dtype(device), device=device)
    stacked = torch.stack(powers)
    return stacked.amax() if order == math.inf else stacked.sum()


def _device_power(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    device = tensors[0].device
    if device.type == "cpu":
        return _cpu_power(tensors, order)
    norms = torch.stack(foreach_norm(tensors, order, wide_dtype(device)))
    return norms.amax() if order == math.inf else norms.pow(order).sum()


def _cpu_power(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    if order == math.inf:
        return _joined([extreme for tensor in tensors for extreme in torch.aminmax(tensor)]).abs().amax()
    if order == 2:
        exact = [tensor for tensor in tensors if tensor.dtype is torch.float64 or not tensor.is_contiguous()]
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in exact]
        apart = set(map(id, exact))
        norms += stretch_norms(tensor for tensor in tensors if id(tensor) not in apart)
        power = _joined(norms).square().sum()
        if LEAST**2 < power < LARGEST**2:
            return power
    powers = torch.stack([torch.linalg.vector_norm(tensor, order, dtype=torch.float64) for tensor in tensors])
    return powers.pow(order).sum()


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """All the numbers of 0-d and 1-d tensors in float64; joined by kind, for a call costs as much as many numbers."""
    by_kind: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
    for value in values:
        by_kind.setdefault((value.dtype, value.ndim), []).append(value)
    return torch.cat(
        [torch.cat(alike).double() if dims else torch.stack(alike).double() for (_, dims), alike in by_kind.items()]
    )
