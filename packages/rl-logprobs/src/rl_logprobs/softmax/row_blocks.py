"""Iterate over logits a few rows at a time, in a workspace that fits the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import torch

from rl_logprobs.tensors import has_cpu_costs

#: Elements of one workspace.  On a CPU it should stay in the cache (1 MiB of float32: at half of it, the calls
#: cost a tenth of the time); on an accelerator it must be large enough to hide the kernel launches.
CPU_WORKSPACE = 1 << 18
ACCELERATOR_WORKSPACE = 1 << 23

#: Number of equal tiles that the running tile represents; None outside of ``represent_tiles``.
_multiplicity: ContextVar[int | None] = ContextVar("tile_multiplicity", default=None)


@contextmanager
def represent_tiles() -> Iterator[None]:
    """Run only the first, the second and the last of a loop's tiles within the context."""
    # For a dry run on tensors without data: tiles between the first and the last run the same operators on the same
    # shapes, so the second represents them, and the results are wrong in value but not in shape. The peak of live bytes
    # is right for all tiles, and ``tile_multiplicity`` has the factor for counts. Applies to the current thread, which
    # also runs the backward pass of CPU tensors.
    token = _multiplicity.set(1)
    try:
        yield
    finally:
        _multiplicity.reset(token)


def tile_multiplicity() -> int:
    """Return the number of tiles that the running tile represents, over all nested loops; 1 if every tile runs."""
    return _multiplicity.get() or 1


def tile_indices(count: int) -> Iterator[int]:
    """Yield the indices of ``count`` tiles, all but the last of one size; within ``represent_tiles`` at most three."""
    outer = _multiplicity.get()
    if outer is None:
        yield from range(count)
        return
    try:
        for index in sorted({0, min(1, count - 1), count - 1}) if count else ():
            _multiplicity.set(outer * (count - 2 if index == 1 and count > 2 else 1))
            yield index
    finally:
        _multiplicity.set(outer)


def tile_spans(tokens: int, width: int, size: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Yield the tokens and the columns of each tile of ``[tokens, width]``, tiles of the same columns in a row."""
    rows, columns = size
    for column in tile_indices(-(-width // columns)):
        cols = slice(column * columns, min(width, (column + 1) * columns))
        for row in tile_indices(-(-tokens // rows)):
            yield slice(row * rows, min(tokens, (row + 1) * rows)), cols


def rows_per_workspace(width: int, device: torch.device, *, fraction: float = 1.0) -> int:
    """Return the number of rows of ``width`` columns that fit a ``fraction`` of one workspace, at least one."""
    elements = CPU_WORKSPACE if has_cpu_costs(device) else ACCELERATOR_WORKSPACE
    return max(1, int(elements * fraction) // max(1, width))


def row_blocks(max_rows: int, *tensors: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Yield views ``[rows <= max_rows, width]`` of tensors ``[..., width]`` in token order, with their token slice."""
    # Never copies. Where the leading dims of a tensor cannot be merged by a view (as in ``logits[:, :-1]``), blocks end
    # at the boundary of a possible view, at the same tokens for all tensors.
    start = 0
    for views in _merged_views(tensors):
        tokens = views[0].shape[0]
        if _multiplicity.get() is None:
            for blocks in zip(*(torch.split(view, max_rows) for view in views), strict=True):
                yield slice(start, start + blocks[0].shape[0]), list(blocks)
                start += blocks[0].shape[0]
            continue
        for index in tile_indices(-(-tokens // max(1, max_rows))):
            rows = slice(index * max_rows, min(tokens, (index + 1) * max_rows))
            yield slice(start + rows.start, start + rows.stop), [view[rows] for view in views]
        start += tokens


def _merged_views(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield views ``[tokens, width]`` that cover the tensors in token order."""
    if all(leading_dims_merge(tensor) for tensor in tensors):
        yield [tensor.view(tensor.shape[:-1].numel(), tensor.shape[-1]) for tensor in tensors]
    else:
        for slices in zip(*(tensor.unbind(0) for tensor in tensors), strict=True):
            yield from _merged_views(slices)


def leading_dims_merge(tensor: torch.Tensor) -> bool:
    """Return whether a view can merge all dims but the last."""
    sizes, strides = tensor.shape[:-1], tensor.stride()[:-1]
    dims = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(dims))
