"""Norms of local tensors: accurate at any size and magnitude, without a copy of a gradient.

On a CPU, torch's float32 norm of a large tensor adds up in sequence: 1e-5 off at a million elements, 2e-4 at eight
million (torch 2.11 to 2.15, pytorch/pytorch#169237).  For half precision it first makes a float32 copy of the tensor.
Norms of short blocks have neither problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from rl_logprobs._torch_compat import foreach_norm
from rl_logprobs.norms.chunk_table import fits_table, table_powers
from rl_logprobs.softmax.backends import runs_triton
from rl_logprobs.tensors import has_cpu_costs, wide_dtype

#: Outside these bounds squares leave the range of float32 (1e25 squared overflows, 1e-23 squared vanishes).
LEAST, LARGEST = 1e-15, 1e18

#: Elements of a block, over which a float32 sum is exact to rounding.
BLOCK = 1024
#: Blocks of half precision that are converted to float32 at once, so that they stay in the cache.
BLOCKS_AT_ONCE = 64


def norm_power(
    tensors: Sequence[torch.Tensor], weights: Sequence[float], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the sum of ``weight * |x| ** norm_type`` over all elements, or the largest ``|x|`` for infinity."""
    # The tensors may be empty and on any devices. The result is 0-d on ``device``, float64 (float32 on devices without
    # float64).
    tables: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, float]]] = {}
    others: dict[tuple[torch.device, float], list[torch.Tensor]] = {}
    on_triton = {device: runs_triton(device) for device in {tensor.device for tensor in tensors}}
    for tensor, weight in zip(tensors, weights, strict=True):
        if tensor.numel() and on_triton[tensor.device] and fits_table(tensor):
            tables.setdefault((tensor.device, tensor.dtype), []).append((tensor, weight))
        elif tensor.numel():
            others.setdefault((tensor.device, weight), []).append(tensor)
    is_max = norm_type == math.inf
    powers = [table_powers(weighted, norm_type) for weighted in tables.values()]
    powers = [(power.amax() if is_max else power.sum()).to(device) for power in powers]
    for (_, weight), group in others.items():
        power = _device_power(group, norm_type).to(device)
        powers.append(power if is_max else power * weight)
    if not powers:
        return torch.zeros((), dtype=wide_dtype(device), device=device)
    if len(powers) == 1:
        return powers[0]
    stacked = torch.stack(powers)
    return stacked.amax() if is_max else stacked.sum()


def _device_power(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    device = tensors[0].device
    if has_cpu_costs(device):
        return _cpu_power(tensors, norm_type)
    norms = torch.stack(foreach_norm(tensors, norm_type, wide_dtype(device)))
    return norms.amax() if norm_type == math.inf else norms.pow(norm_type).sum()


def _cpu_power(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    if norm_type == math.inf:
        return _to_float64([extreme for tensor in tensors for extreme in torch.aminmax(tensor)]).abs().amax()
    if norm_type == 2:
        power = _sum_of_squares(tensors)
        if LEAST**2 < power < LARGEST**2:
            return power
    powers = torch.stack([torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float64) for tensor in tensors])
    return powers.pow(norm_type).sum()


def _sum_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares in float64, exact unless squares leave the range of float32."""
    direct = [tensor for tensor in tensors if tensor.dtype is torch.float64 or not tensor.is_contiguous()]
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in direct]
    direct_ids = set(map(id, direct))
    norms += block_norms(tensor for tensor in tensors if id(tensor) not in direct_ids)
    return _to_float64(norms).square().sum()


def _to_float64(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all numbers of 0-d and 1-d tensors as one float64 tensor."""
    # Joins tensors of one dtype and dim before the conversion, because a call costs as much as many numbers.
    groups: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
    for value in values:
        groups.setdefault((value.dtype, value.ndim), []).append(value)
    return torch.cat(
        [torch.cat(group).double() if ndim else torch.stack(group).double() for (_, ndim), group in groups.items()]
    )


def block_norms(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norms of all blocks of the tensors; the norm of these is the norm of the tensors."""
    # The tensors are contiguous, on a CPU, in float32 or half precision, and not empty. The norms are float32, 1-d for
    # full blocks and 0-d for shorter remainders.
    norms: list[torch.Tensor] = []
    short: list[torch.Tensor] = []
    workspace = torch.empty(0)
    for tensor in tensors:
        length = tensor.numel()
        if length <= BLOCK:
            short.append(tensor)
            continue
        if remainder := length % BLOCK:
            tensor, tail = torch.split(tensor.view(-1), [length - remainder, remainder])
            short.append(tail)
        rows = tensor.view(-1, BLOCK)
        if rows.dtype is torch.float32:
            norms.append(torch.linalg.vector_norm(rows, dim=1))
        else:
            workspace = workspace if len(workspace) else torch.empty(BLOCKS_AT_ONCE, BLOCK)
            for blocks in torch.split(rows, BLOCKS_AT_ONCE) if len(rows) > BLOCKS_AT_ONCE else (rows,):
                converted = workspace if len(blocks) == BLOCKS_AT_ONCE else workspace[: len(blocks)]
                norms.append(torch.linalg.vector_norm(converted.copy_(blocks), dim=1))
    return norms + (foreach_norm(short, 2, torch.float32) if short else [])
