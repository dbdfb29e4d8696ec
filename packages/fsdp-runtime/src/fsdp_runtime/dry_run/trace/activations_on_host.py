"""Activations that a traced step keeps on the host: they are counted, and take no memory of the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime.memory import host_copies


class UncountedCopies(host_copies.HostCopies):
    """Copies to a host with enough memory; the trace sees the tensors that come back."""

    def __init__(self) -> None:
        self.held = host_copies.HeldBytes(checked=math.inf)

    def to_host(self, source: Tensor) -> Any:
        """Return the sizes of a tensor."""
        return source.shape, source.dtype

    def to_device(self, host: Any) -> Tensor:
        """Return a new tensor of the device."""
        shape, dtype = host
        return torch.empty(shape, dtype=dtype)


@contextmanager
def uncounted_copies() -> Iterator[UncountedCopies]:
    """Let ``ActivationCheckpointing(offload=True)`` copy nothing in a trace."""
    copies, original = UncountedCopies(), host_copies.make_copies
    host_copies.make_copies = lambda _device: copies
    try:
        yield copies
    finally:
        host_copies.make_copies = original
