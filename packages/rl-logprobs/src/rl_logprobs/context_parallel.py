"""Sequences that are split over a context-parallel axis, in order or load-balanced.

An *order* lists, for the ranks' tokens one rank after another, each token's position in the sequence (torch's
``context_parallel`` makes one when an ``arange`` is among its buffers).  Targets are shifted in the full sequence
and then cut, so that a rank's last token is scored against the right one without any logits being gathered:

    targets = sequence_shard(next_token_targets(token_ids), order, group)
    logprobs = gather_sequence(token_logprobs(logits, targets), order, group)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rl_logprobs._torch_compat import all_gather_into, apply_function
from rl_logprobs.errors import ShapeError


def load_balanced_order(length: int, ranks: int) -> torch.Tensor:
    """The order that gives each rank one chunk from either end, so that causal attention costs all alike.

    Args:
        length: tokens of a sequence, a multiple of ``2 * ranks``.
        ranks: size of the context-parallel axis.

    Returns:
        ``[length]`` int64: of ``2 * ranks`` chunks, rank ``r`` holds the ``r``-th and the ``r``-th from the end
        (Llama 3, arXiv:2407.21783, section 3.3.2).

    Raises:
        ShapeError: the length does not divide.
    """
    if ranks < 1 or length % (2 * ranks):
        raise ShapeError(f"{length} tokens do not divide into 2 x {ranks} chunks; pad to a multiple of {2 * ranks}")
    chunks = torch.arange(length).view(2 * ranks, -1)
    pairs = [part for rank in range(ranks) for part in (chunks[rank], chunks[2 * ranks - 1 - rank])]
    return torch.cat(pairs)


def sequence_shard(full: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup, *, dim: int = -1) -> torch.Tensor:
    """This rank's tokens of a tensor in sequence order; no communication.

    Args:
        full: tensor with a sequence dim in sequence order.
        order: ``[seq]``, see ``load_balanced_order``.
        group: the context-parallel group.
        dim: the sequence dim.

    Returns:
        ``full`` with ``seq / ranks`` tokens, in the order in which this rank holds them.

    Raises:
        ShapeError: the order does not have one entry a token, or does not divide by the ranks.
    """
    return full.index_select(dim, _ranks_part(order, group, full.shape[dim]))


def gather_sequence(
    local: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup, *, dim: int = -1
) -> torch.Tensor:
    """The tokens of all ranks in sequence order, on every rank; the inverse of ``sequence_shard``.

    One all-gather forward and nothing backward: all ranks are taken to do the same with the result, and each
    keeps its own tokens' gradient.

    Args:
        local: this rank's tokens, such as log-probabilities ``[batch, seq / ranks]``.
        order: ``[seq]``, the same on all ranks.
        group: the context-parallel group.
        dim: the sequence dim.

    Returns:
        The tensor with all ``seq`` tokens in order.

    Raises:
        ShapeError: the order does not have one entry a token, or does not divide by the ranks.
    """
    dim %= local.dim()
    mine = _ranks_part(order, group, local.shape[dim] * dist.get_world_size(group))
    gathered: torch.Tensor = apply_function(_Gather, local, order.argsort(), mine, group, dim)
    return gathered


def _ranks_part(order: torch.Tensor, group: dist.ProcessGroup, tokens: int) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    if order.dim() != 1 or order.shape[0] != tokens or tokens % ranks:
        raise ShapeError(
            f"the order has shape {tuple(order.shape)} for {tokens} tokens over {ranks} ranks; it must hold each "
            f"position once and divide by the ranks"
        )
    return order.chunk(ranks)[dist.get_rank(group)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        places: torch.Tensor,
        mine: torch.Tensor,
        group: dist.ProcessGroup,
        dim: int,
    ) -> torch.Tensor:
        first = local.movedim(dim, 0).contiguous()
        gathered = first.new_empty(places.shape[0], *first.shape[1:])
        all_gather_into(gathered, first, group)
        ctx.save_for_backward(mine)
        ctx.dim = dim
        return gathered.index_select(0, places).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (mine,) = ctx.saved_tensors
        return gradients[0].index_select(ctx.dim, mine), None, None, None, None
