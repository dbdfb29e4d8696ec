"""Log-probabilities straight from hidden states and the head's weight, without the logits in between."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from rl_logprobs.errors import DtypeError, OptionError, PlacementError, ShapeError
from rl_logprobs.head import Head, head_statistics
from rl_logprobs.layout import TokenSlice, VocabShard, locate_columns, locate_tokens, locate_vocabulary
from rl_logprobs.logprobs import TokenStatistics, checked_temperature, shaped_like
from rl_logprobs.targets import ignored_targets, local_targets
from rl_logprobs.vocab_parallel import SoftmaxOptions


def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | torch.Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    shift: bool = False,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Log-probability of each target under the head's softmax, never holding ``[tokens, vocab / tp]``.

    Logits are ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``, computed tile by tile in
    float32 both forward and backward (the method of "Cut Your Losses", arXiv:2411.09009), so that bfloat16
    inputs lose nothing to bfloat16 logits.  One collective forward; backward one more, for the hidden gradient.
    A head that needs no gradient costs one more product forward and none backward.

    Args:
        hidden: ``[batch, seq, features]`` or ``[tokens, features]``.  A plain tensor that is the same on every
            rank of the vocabulary's axis, or a DTensor that is replicated or (sequence parallelism) sharded on
            the tokens there; a sharded one is gathered, and its gradient reduce-scattered.
        weight: ``[vocab, features]``: a plain tensor; a DTensor whose rows are sharded over one axis of its
            mesh; or, with ``group``, a local shard.  Its other axes must be replicated: take an FSDP head while
            it is unsharded.
        targets: integers of hidden's leading shape, as for ``token_logprobs``.
        bias: ``[vocab]``, lying like the weight's rows.
        logit_scale: factor on the products (Cohere, Granite).
        softcap: positive bound of the logits (Gemma 2).
        temperature: as for ``token_logprobs``.
        group: as for ``token_logprobs``.
        vocab_size: as for ``token_logprobs``.
        vocab_start: as for ``token_logprobs``.
        shift: as for ``token_logprobs``.
        ignore_index: as for ``token_logprobs``.

    Returns:
        Float32 (float64 for float64) of hidden's leading shape, where tokens that were gathered are all there.

    Raises:
        ShapeError, PlacementError, DtypeError, OptionError, TargetError: input that cannot be scored, found
            before any collective starts.
    """
    return linear_token_statistics(
        hidden,
        weight,
        targets,
        bias=bias,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        group=group,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        shift=shift,
        ignore_index=ignore_index,
    ).logprobs


def linear_token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    entropy: bool = False,
    argmax: bool = False,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | torch.Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    shift: bool = False,
    ignore_index: int = -100,
) -> TokenStatistics:
    """Log-probability, log-sum-exp and what else is asked of each token, from the same tiles.

    Args:
        hidden: as for ``linear_token_logprobs``.
        weight: as there.
        targets: as there.
        entropy: also compute the entropy.
        argmax: also find the most probable token.
        bias: as there.
        logit_scale: as there.
        softcap: as there.
        temperature: as there.
        group: as there.
        vocab_size: as there.
        vocab_start: as there.
        shift: as there.
        ignore_index: as there.

    Returns:
        The statistics, each differentiable but ``argmax``.

    Raises:
        ShapeError, PlacementError, DtypeError, OptionError, TargetError: as ``linear_token_logprobs``.
    """
    _check_head(hidden, weight, bias, logit_scale, softcap)
    shard = _locate_weight(weight, group, vocab_size, vocab_start)
    tokens = _tokens_after_gather(hidden, shard.group)
    mine = local_targets(targets, tokens, shift=shift, ignore_index=ignore_index)
    ignored = ignored_targets(mine, vocab_size=shard.vocab_size, ignore_index=ignore_index)
    options = SoftmaxOptions(temperature=checked_temperature(temperature, mine), entropy=entropy, argmax=argmax)
    rows, sum_hidden = _gather_tokens(hidden, shard.group)
    found = head_statistics(
        rows.reshape(-1, rows.shape[-1]),
        weight.to_local() if isinstance(weight, DTensor) else weight,
        bias.to_local() if isinstance(bias, DTensor) else bias,
        mine.reshape(-1),
        ignored.reshape(-1),
        Head(shard=shard, logit_scale=logit_scale, softcap=softcap, sum_hidden=sum_hidden),
        options,
    )
    return shaped_like(mine, found)


def _check_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    logit_scale: float,
    softcap: float | None,
) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise DtypeError(f"{name} must be floating point, got {tensor.dtype}")
    if hidden.dim() < 2 or 0 in hidden.shape[:-1]:
        raise ShapeError(f"hidden must be [..., tokens, features] with at least one token, got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ShapeError(
            f"weight must be [vocab, {hidden.shape[-1]}] for hidden {tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    alike = bias is None or isinstance(bias, DTensor) == isinstance(weight, DTensor)
    if bias is not None and (not alike or bias.shape != weight.shape[:1]):
        raise ShapeError(
            f"bias {tuple(bias.shape)} must lie like the rows of weight {tuple(weight.shape)}: both DTensors or "
            f"both local"
        )
    if isinstance(bias, DTensor) and isinstance(weight, DTensor) and bias.placements != weight.placements:
        raise PlacementError(f"bias has {bias.placements} and weight {weight.placements}; place them alike")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise OptionError(f"softcap must be positive and finite, got {softcap}; leave it out for no cap")
    if not math.isfinite(logit_scale):
        raise OptionError(f"logit_scale must be finite, got {logit_scale}")


def _locate_weight(
    weight: torch.Tensor, group: dist.ProcessGroup | None, vocab_size: int | None, vocab_start: int | None
) -> VocabShard:
    if not isinstance(weight, DTensor):
        return locate_columns(weight.shape[0], group, vocab_size, vocab_start)
    if group is not None or vocab_start is not None:
        raise OptionError("a DTensor knows its own layout: leave out group and vocab_start")
    sharded = sum(not isinstance(placement, Replicate) for placement in weight.placements)
    if sharded > 1 or weight.to_local().shape[1] != weight.shape[1]:
        raise PlacementError(
            f"weight is placed {weight.placements}; its rows may be sharded over one axis (the vocabulary's) and "
            f"nothing else, so call this while an FSDP head is unsharded (module.unshard(), or inside forward)"
        )
    return locate_vocabulary(weight, 0, vocab_size)


def _vocabulary_dim(hidden: DTensor, group: dist.ProcessGroup | None) -> int | None:
    """The mesh dim of hidden that is the vocabulary's group, if it has one."""
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    mesh = hidden.device_mesh
    for dim in range(mesh.ndim):
        if dist.get_process_group_ranks(mesh.get_group(dim)) == ranks:
            return dim
    raise PlacementError(
        f"the weight's vocabulary is sharded over ranks {ranks}, which is no axis of hidden's mesh {mesh}; place "
        f"hidden on a mesh with that axis, or pass its local part"
    )


def _gathered_placements(hidden: DTensor, dim: int | None) -> list[Placement]:
    placements = list(hidden.placements)
    if dim is not None:
        placements[dim] = Replicate()
    for placement in placements:
        if isinstance(placement, Partial) or getattr(placement, "dim", 0) % hidden.dim() == hidden.dim() - 1:
            raise PlacementError(
                f"hidden is placed {hidden.placements}; it must hold whole features on every rank, so "
                f"redistribute it to Replicate() or to a shard of the tokens"
            )
    return placements


def _tokens_after_gather(hidden: torch.Tensor, group: dist.ProcessGroup | None) -> TokenSlice:
    if not isinstance(hidden, DTensor):
        leading = tuple(hidden.shape[:-1])
        return TokenSlice(full=leading, shape=leading, offset=(0,) * len(leading))
    return locate_tokens(hidden, _gathered_placements(hidden, _vocabulary_dim(hidden, group)))


def _gather_tokens(hidden: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, bool]:
    """Hidden states of all tokens of the vocabulary's group, and whether their gradient is yet to be summed.

    The gradient of gathered tokens goes back as a partial sum, which the gather's own backward reduce-scatters.
    """
    if not isinstance(hidden, DTensor):
        return hidden, True
    dim = _vocabulary_dim(hidden, group)
    placements = _gathered_placements(hidden, dim)
    if dim is None or not isinstance(hidden.placements[dim], Shard):
        return hidden.redistribute(placements=placements).to_local(), True
    summed = [Partial() if axis == dim else placement for axis, placement in enumerate(placements)]
    return hidden.redistribute(placements=placements).to_local(grad_placements=summed), False
