"""Iterate over logits a few rows at a time, in a workspace that fits the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import torch

#: Elements of one workspace.  On a CPU it should stay in the cache (1 MiB of float32: at half of it, the calls
#: cost a tenth of the time); on an accelerator it must be large enough to hide the kernel launches.
CPU_WORKSPACE = 1 << 18
ACCELERATOR_WORKSPACE = 1 << 23

_accelerator_assumed: ContextVar[bool] = ContextVar("accelerator_assumed", default=False)


@contextmanager
def assume_accelerator() -> Iterator[None]:
    """Use an accelerator's workspace size for CPU tensors within the context.

    For a dry run, whose CPU or fake tensors stand for tensors on an accelerator.  Applies to the current thread,
    which also runs the backward pass of CPU tensors.

    Example:
        >>> import torch
        >>> from rl_logprobs.softmax.row_blocks import assume_accelerator, rows_per_workspace
        >>> rows_per_workspace(1024, torch.device("cpu"))
        256
        >>> with assume_accelerator():
        ...     rows_per_workspace(1024, torch.device("cpu"))
        8192
    """
    token = _accelerator_assumed.set(True)
    try:
        yield
    finally:
        _accelerator_assumed.reset(token)


def rows_per_workspace(width: int, device: torch.device, *, fraction: float = 1.0) -> int:
    """Return the number of rows of ``width`` columns that fit a ``fraction`` of one workspace, at least one."""
    small = device.type == "cpu" and not _accelerator_assumed.get()
    elements = CPU_WORKSPACE if small else ACCELERATOR_WORKSPACE
    return max(1, int(elements * fraction) // max(1, width))


def row_blocks(max_rows: int, *tensors: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Yield views ``[rows <= max_rows, width]`` of tensors ``[..., width]`` in token order, with their token slice.

    Never copies.  Where the leading dims of a tensor cannot be merged by a view (as in ``logits[:, :-1]``), blocks end
    at the boundary of what can be viewed, at the same tokens for all tensors.
    """
    start = 0
    for views in _merged_views(tensors):
        for blocks in zip(*(torch.split(view, max_rows) for view in views), strict=True):
            yield slice(start, start + blocks[0].shape[0]), list(blocks)
            start += blocks[0].shape[0]


def _merged_views(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield views ``[tokens, width]`` that cover the tensors in token order."""
    if all(_leading_dims_merge(tensor) for tensor in tensors):
        yield [tensor.view(tensor.shape[:-1].numel(), tensor.shape[-1]) for tensor in tensors]
    else:
        for slices in zip(*(tensor.unbind(0) for tensor in tensors), strict=True):
            yield from _merged_views(slices)


def _leading_dims_merge(tensor: torch.Tensor) -> bool:
    sizes, strides = tensor.shape[:-1], tensor.stride()[:-1]
    dims = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(dims))
