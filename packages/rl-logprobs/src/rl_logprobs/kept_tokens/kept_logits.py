"""The logits of the kept ids on every rank of a sharded vocabulary, from logits or from hidden states and the LM head.

Two methods from hidden states.  *By entry*: one dot product per kept id, which reads the kept rows of the head alone.
*By token*: the logits of a few tokens at a time, then the kept logits of these.  A product of matrices costs far less
per logit than single dot products, so that large kept sets are cheaper by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from rl_logprobs._torch_compat import add_product_, apply_function, first_derivative, wide_product
from rl_logprobs.kept_tokens.entries import KeptEntries
from rl_logprobs.softmax.fused_linear import LMHead, operand_dtype, product_dtype
from rl_logprobs.softmax.row_blocks import ACCELERATOR_WORKSPACE, CPU_WORKSPACE
from rl_logprobs.softmax.vocab_shard import VocabColumns
from rl_logprobs.tensors import has_cpu_costs, statistics_dtype

Method = Literal["entry", "token"]

#: The cost of a logit by entry relative to one by token.  ``benchmarks/bench_kept_tokens.py`` measures it on a CPU.  On
#: an accelerator it is the quotient of memory and matrix throughput (an H100 reads 3.3 TB/s and multiplies 0.8 PFLOP/s,
#: and a dot product reads its row, writes and reads the gathered copy).
CPU_ENTRY_COST, ACCELERATOR_ENTRY_COST = 100, 700


def kept_logits(
    logits: torch.Tensor, entries: KeptEntries, shard: VocabColumns, *, inplace_backward: bool = False
) -> torch.Tensor:
    """Return the kept ids' logits ``[entries]`` in the statistics dtype, the same on every rank of the group."""
    # One all-reduce of the entries. One rank holds each entry: sums with zeros are exact, so that the result has the
    # same bits for every number of ranks. The backward pass writes the gradients of this rank's columns without a
    # collective. Entries that do not count are 0 and have no gradient, whatever their logits.
    return cast(torch.Tensor, apply_function(_KeptLogits, logits, entries, shard, inplace_backward))


def own_columns(entries: KeptEntries, shard: VocabColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each entry's column index on this rank (0 for others), and whether the column is this rank's."""
    columns = entries.ids - shard.start
    owned = entries.counted & (columns >= 0) & (columns < shard.width)
    return columns.where(owned, 0), owned


class _KeptLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, entries: KeptEntries, shard: VocabColumns, inplace: bool
    ) -> torch.Tensor:
        columns, owned = own_columns(entries, shard)
        dtype = statistics_dtype(logits.dtype)
        values = torch.zeros(columns.shape, dtype=dtype, device=logits.device)
        if shard.width:
            index = (*torch.unravel_index(entries.rows, logits.shape[:-1]), columns)
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
            index = (*torch.unravel_index(rows, ctx.shape[:-1]), columns)
            out.index_put_(index, d_values.to(ctx.dtype), accumulate=True)
        return out, None, None, None


def cheaper_method(entries: int, tokens: int, vocab_size: int, device: torch.device) -> Method:
    """Return the cheaper method for a number of kept entries."""
    cost = CPU_ENTRY_COST if has_cpu_costs(device) else ACCELERATOR_ENTRY_COST
    return "entry" if entries * cost < tokens * vocab_size else "token"


def kept_linear_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, entries: KeptEntries, head: LMHead
) -> torch.Tensor:
    """Return the kept ids' logits ``[entries]`` in the statistics dtype, the same on every rank of the group."""
    # One all-reduce of the entries forward; backward one for the hidden gradient, unless the caller reduces it. Only
    # kept rows of the head have a gradient. Entries that do not count are 0 and have no gradient. The arguments are
    # as for ``linear_softmax_statistics``.
    method = cheaper_method(entries.ids.shape[0], hidden.shape[0], head.shard.vocab_size, hidden.device)
    logits: torch.Tensor = apply_function(_KeptProducts, hidden, weight, bias, entries, head, method)
    if head.logit_scale != 1.0:
        logits = logits * head.logit_scale
    if head.softcap is not None:
        logits = (logits / head.softcap).tanh() * head.softcap
    return logits


@dataclass(frozen=True)
class _Operands:
    """Hidden states, this rank's rows of the head, and the entries' columns there (0 where not ``owned``)."""

    hidden: torch.Tensor
    weight: torch.Tensor
    entries: KeptEntries
    columns: torch.Tensor
    owned: torch.Tensor


class _KeptProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        entries: KeptEntries,
        head: LMHead,
        method: Method,
    ) -> torch.Tensor:
        columns, owned = own_columns(entries, head.shard)
        values = torch.zeros(columns.shape, dtype=product_dtype(hidden, weight), device=hidden.device)
        if head.shard.width:
            write = _products_by_entry if method == "entry" else _products_by_token
            write(_Operands(hidden, weight, entries, columns, owned), values)
            if bias is not None:
                values += bias[columns].to(values.dtype)
            values = values.where(owned, 0)
        if head.shard.group is not None:
            dist.all_reduce(values, group=head.shard.group)
        ctx.save_for_backward(hidden, weight, bias, columns, owned)
        ctx.entries, ctx.head, ctx.method = entries, head, method
        return values

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *d_logits: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, columns, owned = ctx.saved_tensors
        d_values = d_logits[0].where(owned, 0)
        d_hidden, d_weight, d_bias = (
            torch.zeros_like(tensor, dtype=d_values.dtype) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        if ctx.head.shard.width:
            write = _gradients_by_entry if ctx.method == "entry" else _gradients_by_token
            write(_Operands(hidden, weight, ctx.entries, columns, owned), d_values, d_hidden, d_weight)
            if d_bias is not None:
                d_bias.index_add_(0, columns, d_values)
        if d_hidden is not None and ctx.head.shard.group is not None and ctx.head.reduce_hidden_grad:
            dist.all_reduce(d_hidden, group=ctx.head.shard.group)
        pairs = zip((d_hidden, d_weight, d_bias), (hidden, weight, bias), strict=True)
        gradients = (None if gradient is None else gradient.to(tensor.dtype) for gradient, tensor in pairs)
        return *gradients, None, None, None


def _entry_spans(features: int, owned: torch.Tensor) -> Iterator[torch.Tensor | slice]:
    """Yield indices of this rank's entries, a workspace of rows at a time."""
    # On an accelerator all entries, because the host does not know their number; other ranks' entries read row 0.
    on_cpu = has_cpu_costs(owned.device)
    size = max(1, (CPU_WORKSPACE if on_cpu else ACCELERATOR_WORKSPACE) // features)
    if on_cpu:
        yield from torch.split(owned.nonzero()[:, 0], size)
    else:
        for start in range(0, owned.shape[0], size):
            yield slice(start, start + size)


def _products_by_entry(of: _Operands, values: torch.Tensor) -> None:
    for span in _entry_spans(of.hidden.shape[1], of.owned):
        states = of.hidden.index_select(0, of.entries.rows[span]).to(values.dtype)
        head_rows = of.weight.index_select(0, of.columns[span]).to(values.dtype)
        values[span] = states.mul_(head_rows).sum(-1)


def _gradients_by_entry(
    of: _Operands, d_values: torch.Tensor, d_hidden: torch.Tensor | None, d_weight: torch.Tensor | None
) -> None:
    for span in _entry_spans(of.hidden.shape[1], of.owned):
        rows, cols, coef = of.entries.rows[span], of.columns[span], d_values[span, None]
        if d_hidden is not None:
            d_hidden.index_add_(0, rows, of.weight.index_select(0, cols).to(coef.dtype).mul_(coef))
        if d_weight is not None:
            states = of.hidden.index_select(0, rows).to(coef.dtype)
            d_weight.index_add_(0, cols, states.mul_(coef).masked_fill_(coef == 0, 0))


def _token_spans(weight: torch.Tensor, entries: KeptEntries) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of tokens with logits that fit a workspace, and the range of their entries."""
    # If there are several, the host waits once for an accelerator.
    tokens = entries.offsets.shape[0] - 1
    workspace = CPU_WORKSPACE if has_cpu_costs(weight.device) else ACCELERATOR_WORKSPACE
    size = max(64, workspace // weight.shape[0])
    if tokens <= size:
        yield slice(0, tokens), slice(0, entries.ids.shape[0])
        return
    starts = [*entries.offsets[::size].tolist(), entries.ids.shape[0]]
    for index, start in enumerate(range(0, tokens, size)):
        yield slice(start, min(tokens, start + size)), slice(starts[index], starts[index + 1])


def _products_by_token(of: _Operands, values: torch.Tensor) -> None:
    dtype = operand_dtype(of.hidden, of.weight)
    head = of.weight.to(dtype)
    for tokens, span in _token_spans(of.weight, of.entries):
        logits = wide_product(of.hidden[tokens].to(dtype), head.t(), values.dtype)
        values[span] = logits[of.entries.rows[span] - tokens.start, of.columns[span]]


def _gradients_by_token(
    of: _Operands, d_values: torch.Tensor, d_hidden: torch.Tensor | None, d_weight: torch.Tensor | None
) -> None:
    dtype = operand_dtype(of.hidden, of.weight)
    head = of.weight.to(dtype)
    for tokens, span in _token_spans(of.weight, of.entries):
        tile = d_values.new_zeros(tokens.stop - tokens.start, head.shape[0])
        index = (of.entries.rows[span] - tokens.start, of.columns[span])
        tile.index_put_(index, d_values[span], accumulate=True)
        operand = tile.to(dtype)
        if d_hidden is not None:
            add_product_(d_hidden[tokens], operand, head)
        if d_weight is not None:
            uncounted = (tile == 0).all(-1, keepdim=True)
            add_product_(d_weight, operand.t(), of.hidden[tokens].to(dtype).masked_fill(uncounted, 0))
