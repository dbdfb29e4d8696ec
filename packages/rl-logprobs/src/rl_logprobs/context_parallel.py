"""Sequences that are sharded over a context-parallel axis, contiguous or load-balanced.

A *permutation* lists each token's position in the sequence, for the tokens of rank 0, then of rank 1, and so on
(torch's ``context_parallel`` makes one when an ``arange`` is among its buffers).  Shift targets in the full sequence,
then shard them: the last token of a rank is scored against the right target, and no logits are gathered.

    targets = sequence_shard(next_token_targets(token_ids), permutation, group)
    logprobs = gather_sequence(token_logprobs(logits, targets), permutation, group)
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from rl_logprobs._torch_compat import all_gather_single, apply_function, first_derivative
from rl_logprobs.errors import DtypeError, OptionError, ShapeError
from rl_logprobs.tensors import require_same_device


def headtail_permutation(length: int, ranks: int) -> torch.Tensor:
    """Return the permutation that gives each rank a chunk from both ends, which balances causal attention.

    Args:
        length: tokens of a sequence, a multiple of ``2 * ranks``.
        ranks: size of the context-parallel axis.

    Returns:
        ``[length]`` int64: of ``2 * ranks`` chunks, rank ``r`` holds the ``r``-th and the ``r``-th from the end
        (Llama 3, arXiv:2407.21783, section 3.3.2).

    Raises:
        ShapeError: the length is not a multiple of ``2 * ranks``.

    Example:
        >>> from rl_logprobs import headtail_permutation
        >>> headtail_permutation(8, ranks=2)
        tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if ranks < 1 or not 0 <= length < 1 << 63 or length % (2 * ranks):
        raise ShapeError(f"{length} tokens do not divide into 2 x {ranks} chunks; pad to a multiple of {2 * ranks}")
    chunks = torch.arange(length).view(2 * ranks, -1)
    pairs = [part for rank in range(ranks) for part in (chunks[rank], chunks[2 * ranks - 1 - rank])]
    return torch.cat(pairs)


def sequence_shard(
    full: torch.Tensor, permutation: torch.Tensor, group: dist.ProcessGroup, *, dim: int = -1
) -> torch.Tensor:
    """Return this rank's tokens of a tensor in sequence order; no communication.

    Args:
        full: tensor with a sequence dim of ``seq`` tokens, in sequence order.
        permutation: ``[seq]`` int64, the same on all ranks; see ``headtail_permutation``.
        group: the context-parallel group.
        dim: the sequence dim.

    Returns:
        ``full`` with ``seq / ranks`` tokens, in the order in which this rank holds them.

    Raises:
        ShapeError: the permutation does not have one entry per token, its length is not a multiple of the ranks, or
            the tensor has no such dim.
        DtypeError: the permutation does not hold integers.
        OptionError: the devices differ, or the group is None.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from rl_logprobs import headtail_permutation, sequence_shard
        >>> store = dist.HashStore()  # one rank; torchrun starts several
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> sequence_shard(torch.tensor([5, 6, 7, 8]), headtail_permutation(4, ranks=1), dist.group.WORLD)
        tensor([5, 6, 7, 8])
        >>> dist.destroy_process_group()
    """
    dim = _sequence_dim(full, dim)
    require_same_device(full=full, permutation=permutation)
    return full.index_select(dim, _rank_positions(permutation, group, full.shape[dim]))


def gather_sequence(
    local: torch.Tensor, permutation: torch.Tensor, group: dist.ProcessGroup, *, dim: int = -1
) -> torch.Tensor:
    """Return the tokens of all ranks in sequence order, on every rank; the inverse of ``sequence_shard``.

    One all-gather forward and no communication backward: all ranks are assumed to compute the same function of the
    result, and each rank keeps its own tokens' gradient.

    Args:
        local: this rank's tokens, such as log-probabilities ``[batch, seq / ranks]``.
        permutation: ``[seq]`` int64, the same on all ranks.
        group: the context-parallel group.
        dim: the sequence dim.

    Returns:
        The tensor with all ``seq`` tokens in sequence order.

    Raises:
        LogprobsError: as ``sequence_shard``.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from rl_logprobs import gather_sequence, headtail_permutation
        >>> store = dist.HashStore()  # one rank; torchrun starts several
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> gather_sequence(torch.tensor([5, 6, 7, 8]), headtail_permutation(4, ranks=1), dist.group.WORLD)
        tensor([5, 6, 7, 8])
        >>> dist.destroy_process_group()
    """
    dim = _sequence_dim(local, dim)
    require_same_device(local=local, permutation=permutation)
    positions = _rank_positions(permutation, group, local.shape[dim] * dist.get_world_size(group))
    return cast(torch.Tensor, apply_function(_GatherSequence, local, permutation.argsort(), positions, group, dim))


def _sequence_dim(tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ShapeError(f"dim {dim} is not one of the {tensor.dim()} dims of a tensor {tuple(tensor.shape)}")
    return dim % tensor.dim()


def _rank_positions(permutation: torch.Tensor, group: dist.ProcessGroup, tokens: int) -> torch.Tensor:
    """Return the sequence positions of this rank's tokens."""
    if group is None:  # torch would take the world
        raise OptionError("group must be the context-parallel process group, got None")
    ranks = dist.get_world_size(group)
    if permutation.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"permutation must be int64 or int32, got {permutation.dtype}")
    if permutation.dim() != 1 or permutation.shape[0] != tokens or tokens % ranks:
        raise ShapeError(
            f"the permutation has shape {tuple(permutation.shape)} for {tokens} tokens over {ranks} ranks; it must "
            f"hold each position once, and its length must be a multiple of the ranks"
        )
    return permutation.chunk(ranks)[dist.get_rank(group)]


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        inverse_permutation: torch.Tensor,
        positions: torch.Tensor,
        group: dist.ProcessGroup,
        dim: int,
    ) -> torch.Tensor:
        seq_first = local.movedim(dim, 0).contiguous()
        gathered = seq_first.new_empty(inverse_permutation.shape[0], *seq_first.shape[1:])
        all_gather_single(gathered, seq_first, group)
        ctx.save_for_backward(positions)
        ctx.dim = dim
        return gathered.index_select(0, inverse_permutation).movedim(0, dim)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (positions,) = ctx.saved_tensors
        return gradients[0].index_select(ctx.dim, positions), None, None, None, None
