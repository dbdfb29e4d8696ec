"""Functional collectives as operators, which are private in all versions from 2.10 to 2.15.

They are those that DTensor calls: selective checkpointing saves their results by name, and dry runs count them.  The
Python functions around them take five times as long on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_ops = torch.ops._c10d_functional


def all_reduced(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the ranks; the tensor stays as it is."""
    summed: Tensor = _ops.wait_tensor(_ops.all_reduce(tensor.contiguous(), "sum", group.group_name))
    return summed


def gathered(rows: Tensor, group: ProcessGroup, ranks: int) -> Tensor:
    """Return the ranks' rows ``[rows, ...]``, of equal number, one after another."""
    full: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(rows, ranks, group.group_name))
    return full


def reduce_scattered(rows: Tensor, group: ProcessGroup, ranks: int) -> Tensor:
    """Return this rank's part of the sum over the ranks, whose first dim is a multiple of their number."""
    own: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(rows, "sum", ranks, group.group_name))
    return own
