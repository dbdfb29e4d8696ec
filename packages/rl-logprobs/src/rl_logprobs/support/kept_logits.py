"""The logits of the kept ids, on every rank of a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rl_logprobs._torch_compat import apply_function, first_derivative
from rl_logprobs.dtypes import statistics_dtype
from rl_logprobs.softmax.vocab_shard import VocabColumns
from rl_logprobs.support.entries import KeptEntries


def kept_logits(
    logits: torch.Tensor, entries: KeptEntries, shard: VocabColumns, *, inplace_backward: bool = False
) -> torch.Tensor:
    """Return the kept ids' logits ``[entries]`` in the statistics dtype, the same on every rank of the group."""
    # One all-reduce of the entries. One rank holds each entry: sums with zeros are exact, so that the result has the
    # same bits for every number of ranks. The backward pass writes the gradients of this rank's columns without a
    # collective. Entries that do not count are 0 and have no gradient, whatever their logits.
    found: torch.Tensor = apply_function(_KeptLogits, logits, entries, shard, inplace_backward)
    return found


def own_columns(entries: KeptEntries, shard: VocabColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each entry's column index on this rank (0 for others), and whether the column is this rank's."""
    columns = entries.ids - shard.start
    owned = entries.counted & (columns >= 0) & (columns < shard.width)
    return columns.where(owned, 0), owned


def _leading_indices(rows: torch.Tensor, shape: torch.Size) -> list[torch.Tensor]:
    """Return the index into each dim of ``shape`` for flat positions."""
    indices: list[torch.Tensor] = []
    for size in reversed(shape):
        indices.insert(0, rows % size)
        rows = rows // size
    return indices


class _KeptLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, entries: KeptEntries, shard: VocabColumns, inplace: bool
    ) -> torch.Tensor:
        columns, owned = own_columns(entries, shard)
        dtype = statistics_dtype(logits.dtype)
        values = torch.zeros(columns.shape, dtype=dtype, device=logits.device)
        if shard.width:
            index = (*_leading_indices(entries.rows, logits.shape[:-1]), columns)
            values = logits[index].to(dtype).where(owned, values)
        if shard.group is not None:
            dist.all_reduce(values, group=shard.group)
        ctx.save_for_backward(logits if inplace else None, entries.rows, columns, owned)
        ctx.shape, ctx.dtype, ctx.width = logits.shape, logits.dtype, shard.width
        return values

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, rows, columns, owned = ctx.saved_tensors
        d_values = gradients[0].where(owned, 0)
        out = torch.zeros(ctx.shape, dtype=ctx.dtype, device=d_values.device) if logits is None else logits.zero_()
        if ctx.width:  # entries of other ranks add 0 to column 0
            index = (*_leading_indices(rows, ctx.shape[:-1]), columns)
            out.index_put_(index, d_values.to(ctx.dtype), accumulate=True)
        return out, None, None, None
