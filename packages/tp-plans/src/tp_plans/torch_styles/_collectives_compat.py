"""Functional collectives as operators, which are private in all versions from 2.10 to 2.15.

They are those that DTensor calls: selective checkpointing saves their results by name, and dry runs count them.  The
Python functions around them, and the operators' own autograd formulas in Python, take five times as long on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops._c10d_functional
_wait: Callable[..., Any] = _ops.wait_tensor.default
_all_reduce: Callable[..., Any] = _ops.all_reduce.default
_all_gather: Callable[..., Any] = _ops.all_gather_into_tensor.default
_reduce_scatter: Callable[..., Any] = _ops.reduce_scatter_tensor.default
_without_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd


def all_reduced(tensor: Tensor, group: str) -> Tensor:
    """Return the sum over the ranks of a process group, given by name; the tensor stays as it is."""
    tensor = tensor.contiguous()
    with _without_autograd():
        summed: Tensor = _wait(_all_reduce(tensor, "sum", group))
    return summed


def gathered(rows: Tensor, group: str, ranks: int) -> Tensor:
    """Return the ranks' rows ``[rows, ...]``, of equal number, one after another."""
    with _without_autograd():
        full: Tensor = _wait(_all_gather(rows, ranks, group))
    return full


def reduce_scattered(rows: Tensor, group: str, ranks: int) -> Tensor:
    """Return this rank's part of the sum over the ranks, whose first dim is a multiple of their number."""
    with _without_autograd():
        own: Tensor = _wait(_reduce_scatter(rows, "sum", ranks, group))
    return own
