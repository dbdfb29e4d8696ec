"""Activations that a run moves to the host in forward and back in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fsdp_runtime._torch_compat import viewed_tensor

#: Smaller tensors stay on the device (torchtune's and TRL's ``OffloadActivations``).
_MIN_BYTES = 1024


@contextmanager
def host_activations() -> Iterator[None]:
    """Let forward save no activations on the device: backward allocates them again when it needs them.

    Inside of recomputed blocks these are the blocks' inputs.  Parameters and views of them stay.
    """
    with saved_tensors_hooks(_to_host, _from_host):
        yield


def _to_host(tensor: Tensor) -> Any:
    kept = isinstance(tensor, nn.Parameter) or isinstance(viewed_tensor(tensor), nn.Parameter)
    if kept or not tensor.is_floating_point() or tensor.nbytes < _MIN_BYTES:
        return tensor
    return tensor.shape, tensor.stride(), tensor.dtype


def _from_host(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    shape, stride, dtype = saved
    return torch.empty_strided(shape, stride, dtype=dtype)
