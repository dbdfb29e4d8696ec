"""Exchanges of a sequence that is sharded over ``cp``: gathered tokens, tokens for heads, and tokens before chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from fsdp_runtime._torch_compat import all_gather_flat, reduce_scatter_flat
from fsdp_runtime.steps.context.sharding import SequenceLayout
from tp_plans.runtime import direct

_Exchanging = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def gather_keys_and_values(parts: list[Tensor], layout: SequenceLayout, group: ProcessGroup) -> list[Tensor]:
    """All-gather tensors ``[batch, heads, seq / cp, *]`` over ``cp`` in sequence order, in one call."""
    # The tensors may differ in the last dim. Backward sums all ranks' gradients per token, by one reduce-scatter.
    apply: Callable[..., Sequence[Tensor]] = _Gather.apply if torch.compiler.is_compiling() else _gather
    return list(apply(layout, group, *parts))


def gather_features(parts: Sequence[Tensor], layout: SequenceLayout, group: ProcessGroup) -> list[Tensor]:
    """All-gather ``[batch, seq / cp, *]`` over ``cp`` in sequence order in one call, with gradients as above."""
    flat = [part.reshape(*part.shape[:2], -1).unsqueeze(1) for part in parts]
    gathered = gather_keys_and_values(flat, layout, group)
    return [full.reshape(len(part), -1, *part.shape[2:]) for full, part in zip(gathered, parts, strict=True)]


def gather_tokens(local: Tensor, layout: SequenceLayout, group: ProcessGroup, *, dim: int) -> Tensor:
    """All-gather the tokens on ``dim`` of a tensor in sequence order, without gradient."""
    return _gathered(local.movedim(dim, 0).contiguous(), layout, group).movedim(0, dim)


def _gathered(rows: Tensor, layout: SequenceLayout, group: ProcessGroup) -> Tensor:
    """All-gather contiguous rows ``[seq / cp, ...]`` in sequence order."""
    by_rank = rows.new_empty(layout.length, *rows.shape[1:])
    all_gather_flat(by_rank.view(-1), rows.view(-1), group).wait()
    return by_rank if layout.is_contiguous else by_rank.index_select(0, layout.inverse_on(rows.device))


def tokens_to_heads(
    parts: Sequence[Tensor], layout: SequenceLayout, group: ProcessGroup, *, heads_dim: int, tokens_dim: int
) -> tuple[Tensor, ...]:
    """Give each rank its share of the heads on all tokens, in sequence order, by one all-to-all for each dtype."""
    # Tensors are ``[batch, heads, seq / cp, *]`` or ``[batch, seq / cp, heads, *]``, by ``heads_dim`` and
    # ``tokens_dim``; the ranks divide the heads. Source of the method: Jacobs et al., DeepSpeed Ulysses,
    # arXiv:2309.14509.
    by = _HeadExchange(layout, group, heads_dim, tokens_dim)
    exchanged: tuple[Tensor, ...] = _Exchange.apply(by.to_heads, by.to_tokens, *parts)  # type: ignore[no-untyped-call]
    return exchanged


def heads_to_tokens(
    heads: Tensor, layout: SequenceLayout, group: ProcessGroup, *, heads_dim: int, tokens_dim: int
) -> Tensor:
    """Return all heads of this rank's tokens; the inverse of :func:`tokens_to_heads`."""
    by = _HeadExchange(layout, group, heads_dim, tokens_dim)
    exchanged: tuple[Tensor, ...] = _Exchange.apply(by.to_tokens, by.to_heads, heads)  # type: ignore[no-untyped-call]
    return exchanged[0]


def preceding_tokens(local: Tensor, count: int, layout: SequenceLayout, group: ProcessGroup) -> Tensor:
    """Return the ``count`` tokens before each chunk of this rank, zeros before the first; by one all-gather of ends."""
    # From ``[batch, seq / cp, features]`` to ``[batch, chunks, count, features]``.
    chunks = torch.unflatten(local, 1, (layout.chunks_per_rank, -1))
    width = min(count, chunks.shape[2])  # the ends of shorter chunks are the full sequence
    ends = chunks[:, :, chunks.shape[2] - width :].flatten(1, 2)
    of_ends = SequenceLayout(ends.shape[1] * layout.ranks, layout.ranks, layout.rank, layout.load_balancer)
    (gathered,) = gather_features([ends], of_ends, group)
    padded = pad(gathered, (0, 0, count, 0))
    return torch.stack([padded.narrow(1, chunk * width, count) for chunk in layout.chunks], dim=1)


def sum_over_ranks(own: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum over the ranks; a rank gets the gradient of its part."""

    def summed(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        total = parts[0].clone()
        dist.all_reduce(total, group=group)
        return (total,)

    total: tuple[Tensor, ...] = _Exchange.apply(summed, tuple, own)  # type: ignore[no-untyped-call]
    return total[0]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: SequenceLayout, group: ProcessGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.group, ctx.widths = layout, group, [part.shape[-1] for part in parts]
        full = _gathered(_side_by_side(parts), layout, group).movedim(0, 2)
        return tuple(torch.split(full, ctx.widths, dim=-1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_rank = _side_by_side(gradients)
        if not ctx.layout.is_contiguous:
            by_rank = by_rank.index_select(0, ctx.layout.order_on(by_rank.device))
        local = by_rank.new_empty(len(by_rank) // ctx.layout.ranks, *by_rank.shape[1:])
        reduce_scatter_flat(local.view(-1), by_rank.view(-1), ctx.group).wait()
        return None, None, *torch.split(local.movedim(0, 2), ctx.widths, dim=-1)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return ``[batch, heads, tokens, *]`` as contiguous ``[tokens, batch, heads, *]``, joined on the last dim."""
    rows = [part.movedim(2, 0) for part in parts]
    return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)).contiguous()


_gather = direct(_Gather)


@dataclass(frozen=True)
class _HeadExchange:
    """The all-to-alls between tokens and heads, without gradients."""

    layout: SequenceLayout
    group: ProcessGroup
    heads_dim: int
    tokens_dim: int

    def to_heads(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        by_rank = [self._by_rank(part, self.heads_dim) for part in parts]
        order, at = self.layout.inverse_on(parts[0].device), self.tokens_dim
        received = _all_to_all(by_rank, self.group)
        return tuple(part.movedim(0, at).flatten(at, at + 1).index_select(at, order) for part in received)

    def to_tokens(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        order, at = self.layout.order_on(parts[0].device), self.heads_dim
        by_rank = [self._by_rank(part.index_select(self.tokens_dim, order), self.tokens_dim) for part in parts]
        return tuple(part.movedim(0, at).flatten(at, at + 1) for part in _all_to_all(by_rank, self.group))

    def _by_rank(self, part: Tensor, dim: int) -> Tensor:
        return torch.unflatten(part, dim, (self.layout.ranks, -1)).movedim(dim, 0)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: _Exchanging, back: _Exchanging, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return there(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back(gradients)


def _all_to_all(parts: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Exchange tensors ``[cp, *]``, one entry for each rank, by one all-to-all for each dtype."""
    tensors: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(part.dtype for part in parts):
        chosen = {index: part for index, part in enumerate(parts) if part.dtype == dtype}
        sent = torch.cat([part.reshape(len(part), -1) for part in chosen.values()], dim=1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        split = torch.split(received, [part[0].numel() for part in chosen.values()], dim=1)
        tensors |= {index: got.reshape(part.shape) for got, (index, part) in zip(split, chosen.items(), strict=True)}
    return [tensors[index] for index in range(len(parts))]
