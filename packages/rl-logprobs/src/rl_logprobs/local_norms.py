"""Norms of this rank's tensors: accurate at any size and magnitude, with no copy of a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rl_logprobs._torch_compat import foreach_norm
from rl_logprobs.rows import wide_dtype

#: torch's float32 norm on a CPU adds sequentially: 1e-5 off at a million elements, 2e-4 at eight million.
#: Over stretches of this length it is exact to rounding, and just as fast.
STRETCH = 1024
#: Stretches that are read at once where torch first makes a float32 copy of what it reads, as it does on a CPU for
#: half precision: 256 KiB of it, however long the gradient.
WIDENED = 64
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
        power = _joined(_stretch_norms(tensors)).square().sum()
        if LEAST**2 < power < LARGEST**2:
            return power
    norms = torch.stack([torch.linalg.vector_norm(tensor, order, dtype=torch.float64) for tensor in tensors])
    return norms.pow(order).sum()


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """All the numbers of 0-d and 1-d tensors in float64; joined by kind, for a call costs as much as many numbers."""
    by_kind: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
    for value in values:
        by_kind.setdefault((value.dtype, value.ndim), []).append(value)
    return torch.cat([(torch.cat if dims else torch.stack)(alike).double() for (_, dims), alike in by_kind.items()])


def _stretch_norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Norms of stretches of the tensors, 0-d and 1-d, in dtypes in which they are exact to rounding."""
    norms, short = [], []
    for tensor in tensors:
        length = tensor.numel()
        if tensor.dtype is torch.float64 or not tensor.is_contiguous():
            norms.append(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        elif length <= STRETCH:
            short.append(tensor)
        else:
            if rest := length % STRETCH:
                tensor, tail = tensor.view(-1).split([length - rest, rest])
                short.append(tail)
            rows = tensor.view(-1, STRETCH)
            whole = tensor.dtype is torch.float32 or length <= WIDENED * STRETCH
            for block in (rows,) if whole else rows.split(WIDENED):
                norms.append(torch.linalg.vector_norm(block, dim=1, dtype=torch.float32))
    return norms + (foreach_norm(short, 2, torch.float32) if short else [])
