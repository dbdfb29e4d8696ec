"""A hash of a tensor's local bits, equal on ranks that hold equal tensors."""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements that are converted to int64 at once, to bound the extra memory.
_CHUNK = 2**20
#: Odd multipliers (Knuth's, and splitmix64's as a signed number): one by position, one after folding high bits.
_POSITION, _MIX = 2654435761, -7046029254386353131


@torch.no_grad()
def hash_bits(local: Tensor) -> Tensor:
    """Return a 64-bit hash of the elements' bits and positions, a 0-d int64 tensor on the tensor's device.

    Folding after the multiplication keeps sums from cancelling, as they would for two small integers changed in
    opposite directions.

    Args:
        local: a plain tensor of any shape; dtype and shape do not enter the hash.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(local.element_size(), torch.int64)
    flat = local.detach().contiguous().view(-1).view(words) if local.numel() else local.new_empty(0, dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].long()
        mixed = (part + 1) * (torch.arange(start + 1, start + 1 + part.numel(), device=part.device) * _POSITION)
        total += ((mixed ^ (mixed >> 29)) * _MIX).sum()  # wraps around in 64 bits, equally on every rank
    return total
