"""Walking over logits a few rows at a time, in a workspace that fits the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch

#: Elements of one workspace.  On a CPU it should stay in the cache (1 MiB of float32: half of it, and the calls
#: cost a tenth of the time); on an accelerator it must be large enough to hide the kernel launches.
CPU_WORKSPACE = 1 << 18
ACCELERATOR_WORKSPACE = 1 << 23

_cpu_stands_for_accelerator = False


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a softmax over ``dtype`` is summed: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype for the few numbers that decide the result's accuracy: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def rows_that_fit(width: int, device: torch.device, *, share: float = 1.0) -> int:
    """How many rows of ``width`` columns a ``share`` of one workspace holds; at least one."""
    small = device.type == "cpu" and not _cpu_stands_for_accelerator
    elements = CPU_WORKSPACE if small else ACCELERATOR_WORKSPACE
    return max(1, int(elements * share) // max(1, width))


@contextmanager
def as_on_accelerator() -> Iterator[None]:
    """Give CPU tensors the workspaces of an accelerator: for a dry run, whose tensors only stand for others."""
    global _cpu_stands_for_accelerator
    before, _cpu_stands_for_accelerator = _cpu_stands_for_accelerator, True
    try:
        yield
    finally:
        _cpu_stands_for_accelerator = before


def row_blocks(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Views ``[at most rows, width]`` of tensors ``[..., width]`` in token order, with the tokens they cover.

    Never copies: where the leading dims do not merge into one (a slice such as ``logits[:, :-1]``), a block
    ends where the stretch that can be viewed ends, for all tensors alike.
    """
    start = 0
    for stretches in _stretches(tensors):
        for blocks in zip(*(torch.split(stretch, rows) for stretch in stretches), strict=True):
            yield slice(start, start + blocks[0].shape[0]), list(blocks)
            start += blocks[0].shape[0]


def _stretches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    if all(_leading_dims_merge(tensor) for tensor in tensors):
        yield [tensor.view(tensor.shape[:-1].numel(), tensor.shape[-1]) for tensor in tensors]
    else:
        for parts in zip(*(tensor.unbind(0) for tensor in tensors), strict=True):
            yield from _stretches(parts)


def _leading_dims_merge(tensor: torch.Tensor) -> bool:
    sizes, strides = tensor.shape[:-1], tensor.stride()[:-1]
    dims = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(dims))
