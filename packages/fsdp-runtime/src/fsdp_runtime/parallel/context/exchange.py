"""Exchanges of a sequence that is sharded over ``cp``: tokens for heads, and the tokens before each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from fsdp_runtime.parallel.context.attention import gather_keys_and_values
from fsdp_runtime.parallel.context.sharding import SequenceLayout


def tokens_to_heads(parts: Sequence[Tensor], layout: SequenceLayout, group: ProcessGroup) -> list[Tensor]:
    """Give each rank its share of the heads on all tokens, by one all-to-all for each dtype.

    Source of the method: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.

    Args:
        parts: tensors ``[batch, seq / cp, heads, *]`` with the same number of heads, a multiple of the ranks.
        layout: the position of each token.
        group: the ranks of ``cp``.

    Returns:
        The same tensors as ``[batch, seq, heads / cp, *]``, in sequence order.
    """
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(part.dtype for part in parts):
        chosen = {index: part for index, part in enumerate(parts) if part.dtype == dtype}
        flat = [part.flatten(3) if part.dim() > 3 else part.unsqueeze(3) for part in chosen.values()]
        by_rank = torch.unflatten(torch.cat(flat, dim=3), 2, (layout.ranks, -1)).movedim(2, 0)
        received = _all_to_all(by_rank, group).movedim(2, 1).flatten(0, 1)  # tokens in order of ranks
        tokens = received.index_select(0, layout.permutation.to(received.device).argsort()).transpose(0, 1)
        split = torch.split(tokens, [part.shape[3] for part in flat], dim=3)
        for (index, part), each in zip(chosen.items(), split, strict=True):
            found[index] = each.reshape(*each.shape[:3], *part.shape[3:])
    return [found[index] for index in range(len(parts))]


def heads_to_tokens(heads: Tensor, layout: SequenceLayout, group: ProcessGroup) -> Tensor:
    """Return all heads of this rank's tokens ``[batch, seq / cp, heads, *]`` of ``[batch, seq, heads / cp, *]``."""
    by_rank = heads.transpose(0, 1).index_select(0, layout.permutation.to(heads.device))
    received = _all_to_all(torch.unflatten(by_rank, 0, (layout.ranks, -1)), group)
    return received.movedim(0, 2).transpose(0, 1).flatten(2, 3)


def preceding_tokens(local: Tensor, count: int, layout: SequenceLayout, group: ProcessGroup) -> Tensor:
    """Return the tokens before each chunk of this rank, zeros before the first token; by one all-gather of ends.

    Args:
        local: ``[batch, seq / cp, features]``.
        count: how many tokens.
        layout: the position of each token.
        group: the ranks of ``cp``.

    Returns:
        ``[batch, chunks, count, features]``.
    """
    chunks = torch.unflatten(local, 1, (layout.chunks_per_rank, -1))
    kept = min(count, chunks.shape[2])  # of shorter chunks the ends are the full sequence
    ends = chunks[:, :, chunks.shape[2] - kept :].flatten(1, 2)
    of_ends = SequenceLayout(ends.shape[1] * layout.ranks, layout.ranks, layout.rank, layout.load_balancer)
    (gathered,) = gather_keys_and_values([ends.unsqueeze(1)], of_ends, group)
    padded = pad(gathered.squeeze(1), (0, 0, count, 0))
    return torch.stack([padded.narrow(1, chunk * kept, count) for chunk in layout.chunks], dim=1)


def _all_to_all(by_rank: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange ``[ranks, *]``; the gradient travels back the same way."""
    exchanged: Tensor = _AllToAll.apply(by_rank, group)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        sent = by_rank.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sent = gradients[0].contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received, None
