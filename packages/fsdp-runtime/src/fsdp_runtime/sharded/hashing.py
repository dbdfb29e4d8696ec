"""Hash the bits of tensors: equal tensors have equal hashes, and a full tensor's hash sums over its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_runtime.sharded.boxes import inside
from tp_plans.boxes import Box, full_box, split_box

#: Elements that are converted to int64 at once, to bound the extra memory.
_CHUNK = 2**20
#: Integer dtypes by element size, to compare and to hash bits.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Odd multipliers (splitmix64's, as signed numbers): one by position, one after folding high bits.
_POSITION, _MIX = -7046029254386353131, -4658895280553007687


def hash_bits(local: Tensor) -> Tensor:
    """Return a 64-bit hash of the elements' bits and positions, a 0-d int64 tensor on the tensor's device."""
    # Folding after the multiplication prevents cancelling sums: without it, two small integers that change in opposite
    # directions would cancel.
    return hash_box(local, local.shape, full_box(local.shape))


def hash_words(tensor: Tensor) -> Tensor:
    """Return a hash like :func:`hash_bits`; over 8-byte words, which is faster, if the tensor fills whole words."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.nbytes % 8 or not flat.numel():
        return hash_bits(flat)
    return hash_bits((flat if flat.data_ptr() % 8 == 0 else flat.clone()).view(torch.uint8).view(torch.int64))


@torch.no_grad()
def hash_box(values: Tensor, shape: Sequence[int], box: Box) -> Tensor:
    """Return the hash of a box of a full tensor of ``shape``; the hashes of a box's parts sum to the box's hash."""
    # Sums wrap around in 64 bits, equally on every rank. Odd factors lose no bit of a word.
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if not values.numel():
        return total
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    words = WORDS.get(values.element_size(), torch.int64)
    for part in split_box(box, _CHUNK):
        bits = values.detach()[inside(box, part)].contiguous().view(-1).view(words).long()
        mixed = (bits + 1) * ((2 * _positions(part, strides, values.device) + 1) * _POSITION)
        mixed = (mixed ^ (mixed >> 29)) * _MIX
        total += (mixed ^ (mixed >> 32)).sum()
    return total


def _positions(box: Box, strides: Sequence[int], device: torch.device) -> Tensor:
    """The positions of a box's elements in the full tensor, in row-major order."""
    positions = torch.zeros((), dtype=torch.int64, device=device)
    for (start, stop), stride in zip(box, strides, strict=True):
        positions = positions.unsqueeze(-1) + torch.arange(start, stop, device=device) * stride
    return positions.reshape(-1)
