"""A simulated world of one process, tensors without data, and copies to the host that take no memory of the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._torch_compat import clear_dtensor_caches, fake_store, fake_tensors
from fsdp_runtime._transformers_compat.masks import fake_tensors_are_data
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.memory import host_copies
from fsdp_runtime.mesh import MeshSpec
from fsdp_runtime.swaps import swapped


@contextmanager
def fake_world(spec: MeshSpec, *, rank: int) -> Iterator[DeviceMesh]:
    """Make this process one rank of a mesh in which every collective returns at once; undone on exit."""
    world_size = math.prod(spec.sizes.values())
    if not 0 <= rank < world_size:
        raise EstimateError(f"rank {rank} of a mesh of {world_size} ranks: give one from 0 to {world_size - 1}")
    if dist.is_initialized():
        raise EstimateError(
            "torch.distributed is initialized in this process, and a dry run needs its own world: call estimate "
            "before init_process_group, or in another process (the command fsdp-runtime estimate)"
        )
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield spec.build(device_type="cpu")
    finally:
        dist.destroy_process_group()
        clear_dtensor_caches()


@contextmanager
def fake_tensors_without_data() -> Iterator[None]:
    """Create tensors with shapes, dtypes and storage sizes, but without memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with fake_tensors(), fake_tensors_are_data():
            yield
    finally:
        torch.set_num_threads(threads)


class _UncountedCopies(host_copies.HostCopies):
    """Copies to a host with enough memory; the trace sees the tensors that come back."""

    def __init__(self) -> None:
        self.held = host_copies.HeldBytes(checked=math.inf)

    def to_host(self, source: Tensor) -> Any:
        return source.shape, source.dtype

    def to_device(self, host: Any) -> Tensor:
        shape, dtype = host
        return torch.empty(shape, dtype=dtype)


@contextmanager
def uncounted_copies() -> Iterator[_UncountedCopies]:
    """Let ``ActivationCheckpointing(offload=True)`` copy nothing in a trace."""
    copies = _UncountedCopies()
    with swapped(host_copies, make_copies=lambda _device: copies):
        yield copies
