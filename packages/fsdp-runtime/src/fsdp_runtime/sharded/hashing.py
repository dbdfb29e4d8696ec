"""Hashes of tensors' bits: equal on ranks that hold equal tensors, and sums over the parts of a full tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_runtime.sharded.chunks import inside
from tp_plans.transfer import Box, full_box, split_box

#: Elements that are converted to int64 at once, to bound the extra memory.
_CHUNK = 2**20
#: Integers by their bytes, to compare and to hash bits.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Odd multipliers (Knuth's, and splitmix64's as a signed number): one by position, one after folding high bits.
_POSITION, _MIX = 2654435761, -7046029254386353131


def hash_bits(local: Tensor) -> Tensor:
    """Return a 64-bit hash of the elements' bits and positions, a 0-d int64 tensor on the tensor's device."""
    # Folding after the multiplication keeps sums from cancelling, as they would for two small integers changed in
    # opposite directions.
    return hash_box(local, local.shape, full_box(local.shape))


@torch.no_grad()
def hash_box(values: Tensor, shape: Sequence[int], box: Box) -> Tensor:
    """Return the addend of a box to the hash of a full tensor of ``shape``; those of its parts sum to it."""
    # Sums wrap around in 64 bits, equally on every rank.
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if not values.numel():
        return total
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    words = WORDS.get(values.element_size(), torch.int64)
    for part in split_box(box, _CHUNK):
        bits = values.detach()[inside(box, part)].contiguous().view(-1).view(words).long()
        mixed = (bits + 1) * ((_positions(part, strides, values.device) + 1) * _POSITION)
        total += ((mixed ^ (mixed >> 29)) * _MIX).sum()
    return total


def _positions(box: Box, strides: Sequence[int], device: torch.device) -> Tensor:
    """The positions of a box's elements in the full tensor, in row-major order."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for (start, stop), stride in zip(box, strides, strict=True):
        found = found.unsqueeze(-1) + torch.arange(start, stop, device=device) * stride
    return found.reshape(-1)
