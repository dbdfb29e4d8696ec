"""Devices and dtypes of tensors.  A device's costs decide the computation; a sum has a wider dtype than its input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from rl_logprobs._torch_compat import assert_on_device
from rl_logprobs.errors import OptionError

_accelerator_assumed: ContextVar[bool] = ContextVar("accelerator_assumed", default=False)


@contextmanager
def assume_accelerator() -> Iterator[None]:
    """Compute on CPU tensors as on accelerator tensors within the context."""
    # For a dry run: its CPU or fake tensors represent tensors on an accelerator. Triton's kernels get their results'
    # memory and are not launched. Applies to the current thread, which also runs the backward pass of CPU tensors.
    token = _accelerator_assumed.set(True)
    try:
        yield
    finally:
        _accelerator_assumed.reset(token)


def has_cpu_costs(device: torch.device) -> bool:
    """Return whether a CPU computes on the device's tensors: the device is a CPU, outside of ``assume_accelerator``."""
    return device.type == "cpu" and not _accelerator_assumed.get()


def is_accelerator_assumed() -> bool:
    """Return whether tensors represent an accelerator's, and hold no values for its kernels."""
    return _accelerator_assumed.get()


def require_same_device(**tensors: torch.Tensor | None) -> None:
    """Check that all tensors but None are on the device of the first; messages name them by keyword."""
    named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, expected = next((name, tensor.device) for name, tensor in named.items())
    for name, tensor in named.items():
        if tensor.device != expected:
            raise OptionError(f"{name} and {first} are on {tensor.device} and {expected}; move {name}")


def fails(valid: torch.Tensor, message: str) -> bool:
    """Return whether a 0-d check is false on a CPU; an accelerator fails itself, without making the host wait."""
    if valid.device.type == "cpu":
        return not valid
    assert_on_device(valid, message)
    return False


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a softmax over ``dtype`` is summed: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for per-token sums across ranks: float64, or float32 on devices without float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_integral(dtype: torch.dtype) -> bool:
    """Return whether a dtype is an integer dtype; bool is not."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
