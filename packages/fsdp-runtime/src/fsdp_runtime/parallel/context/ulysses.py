"""Heads for sequence by all-to-all: each rank attends with some of the heads over the full sequence.

Before attention each rank gets all tokens of its heads, and after it the tokens go home (DeepSpeed-Ulysses, Jacobs et
al., arXiv:2309.14509).  So attention is that of one rank without ``cp``, with fewer heads: any function computes it,
with any mask.  Key and value heads that ``cp`` does not divide are copied, as often as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import ModelError
from fsdp_runtime.parallel.context.sharding import SequenceLayout
from tp_plans.naming import KV_GROUPS


def attend_over_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout,
    group: ProcessGroup,
) -> Tensor:
    """Compute attention with this rank's heads over the full sequence.

    Args:
        attend: takes queries, keys and values ``[batch, heads / cp, seq, *]`` and returns ``[batch, heads / cp, seq,
            value_dim]``.
        query: ``[batch, heads, seq / cp, dim]``.
        key: ``[batch, kv_heads, seq / cp, dim]``.
        value: ``[batch, kv_heads, seq / cp, value_dim]``.
        layout: the tokens of each rank.
        group: the ranks of ``cp``.

    Returns:
        ``[batch, heads, seq / cp, value_dim]``.

    Raises:
        ModelError: the ranks do not divide the query heads.
    """
    if query.shape[1] % layout.ranks:
        raise ModelError(
            f"{query.shape[1]} query heads on this rank do not divide over cp={layout.ranks}: give "
            "context_parallel='allgather' or 'ring'"
        )
    copies = kv_copies(key.shape[1], layout.ranks)
    if copies > 1:
        key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
    full = _ToHeads.apply(layout, group, query, key, value)  # type: ignore[no-untyped-call]
    (output,) = _ToTokens.apply(layout, group, attend(*full))  # type: ignore[no-untyped-call]
    result: Tensor = output
    return result


def kv_copies(heads: int, ranks: int) -> int:
    """Return how often each key and value head is sent, so that the ranks divide them: 1 where they do already."""
    return lcm(heads, ranks) // heads


class OwnHeads:
    """An attention module as its attention function sees it on a rank with some of the heads.

    Args:
        module: the module.
        heads: its query heads.
        own: this rank's.
        kv_heads: number of this rank's key and value heads.
    """

    def __init__(self, module: nn.Module, heads: int, own: slice, kv_heads: int) -> None:
        self._module, self._heads, self._own = module, heads, own
        self._groups = (own.stop - own.start) // kv_heads

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute; of a parameter with one entry a head, such as sinks, this rank's entries."""
        return self._groups if name == KV_GROUPS else self.of(getattr(self._module, name))

    def of(self, value: Any) -> Any:
        """Return a value; of a tensor with one entry a head and no other dim, this rank's entries."""
        if not isinstance(value, Tensor) or value.numel() != self._heads or self._heads not in value.shape:
            return value
        return value.narrow(list(value.shape).index(self._heads), self._own.start, self._own.stop - self._own.start)

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords of an attention function with this rank's heads."""
        return {name: self.of(value) for name, value in options.items()}


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: SequenceLayout, group: ProcessGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.group = layout, group
        return _to_heads(parts, layout, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_tokens(gradients, ctx.layout, ctx.group)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: SequenceLayout, group: ProcessGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.group = layout, group
        return _to_tokens(parts, layout, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_heads(gradients, ctx.layout, ctx.group)


def _to_heads(parts: tuple[Tensor, ...], layout: SequenceLayout, group: ProcessGroup) -> tuple[Tensor, ...]:
    """From ``[batch, heads, seq / cp, dim]`` to ``[batch, heads / cp, seq, dim]`` in sequence order."""
    by_rank = [torch.unflatten(part, 1, (layout.ranks, -1)).movedim(1, 0) for part in parts]
    order = layout.permutation.argsort().to(parts[0].device)
    exchanged = _exchanged(by_rank, group)
    return tuple(part.movedim(0, 2).flatten(2, 3).index_select(2, order) for part in exchanged)


def _to_tokens(parts: tuple[Tensor, ...], layout: SequenceLayout, group: ProcessGroup) -> tuple[Tensor, ...]:
    """From ``[batch, heads / cp, seq, dim]`` in sequence order to ``[batch, heads, seq / cp, dim]``."""
    order = layout.permutation.to(parts[0].device)
    by_rank = [torch.unflatten(part.index_select(2, order), 2, (layout.ranks, -1)).movedim(2, 0) for part in parts]
    return tuple(part.movedim(0, 1).flatten(1, 2) for part in _exchanged(by_rank, group))


def _exchanged(parts: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Exchange tensors ``[cp, ...]``, one part for each rank, by one all-to-all."""
    sent = torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sizes = [part[0].numel() for part in parts]
    return [got.reshape(part.shape) for got, part in zip(torch.split(received, sizes, dim=1), parts, strict=True)]
