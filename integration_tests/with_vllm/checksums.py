"""Checksums of weights, on both sides of a transfer."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def checksum(tensor: Tensor) -> str:
    """A hash of a tensor's bytes, shape and dtype."""
    own = tensor.detach().cpu().contiguous()
    said = f"{tuple(own.shape)} {own.dtype}".encode()
    return hashlib.sha256(said + own.view(torch.uint8).numpy().tobytes()).hexdigest()
