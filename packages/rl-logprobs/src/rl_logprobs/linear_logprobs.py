"""Log-probabilities from hidden states and the LM head's weight, without the logits in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from rl_logprobs.devices import require_same_device
from rl_logprobs.errors import DtypeError, OptionError, PlacementError, ShapeError
from rl_logprobs.scoring import TokenStatistics, score
from rl_logprobs.softmax.fused_linear import LMHead, linear_softmax_statistics
from rl_logprobs.softmax.log2_scale import check_temperature
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.softmax.vocab_parallel import SoftmaxStatistics
from rl_logprobs.softmax.vocab_shard import (
    TokenSlice,
    VocabColumns,
    VocabShard,
    columns_of_dtensor,
    columns_of_plain,
    token_slice,
)
from rl_logprobs.support.entries import KeptEntries
from rl_logprobs.support.kept_linear import kept_linear_logits
from rl_logprobs.support.kept_sets import Support
from rl_logprobs.targets import Targets, scored_targets


def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | torch.Tensor = 1.0,
    shard: VocabShard | None = None,
    shift: bool = False,
    ignore_index: int = -100,
    support: Support | None = None,
) -> torch.Tensor:
    """Return the log-probability of each target under the LM head's softmax, without a ``[tokens, vocab / tp]`` tensor.

    One collective forward; backward one more, for the hidden gradient.  A head that needs no gradient costs one more
    product forward and none backward.

    Args:
        hidden: ``[batch, seq, features]`` or ``[tokens, features]``, as ``linear_token_statistics`` takes them.
        weight: ``[vocab, features]``: plain, a DTensor, or a local shard.
        targets: integers of hidden's leading shape.
        bias: as all further arguments, that of ``linear_token_statistics``.
        logit_scale: factor on the products.
        softcap: positive bound of the logits.
        temperature: positive number, or positive tensor that broadcasts to this rank's targets.
        shard: which ids the rows of a local weight are, or how many ids are no padding.
        shift: take ``targets`` as token ids and score position ``i`` against token ``i + 1``.
        ignore_index: target of tokens that are not scored.
        support: normalise over the ids that the sampler kept.

    Returns:
        Float32 (float64 for float64 inputs) of hidden's leading shape, after the gather of sharded tokens.

    Raises:
        LogprobsError: as ``linear_token_statistics``, before any collective starts.

    Example:
        >>> import torch
        >>> from rl_logprobs import linear_token_logprobs
        >>> hidden, head = torch.tensor([[1.0, 2.0]]), torch.nn.Linear(2, 3, bias=False)
        >>> _ = head.weight.data.copy_(torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> linear_token_logprobs(hidden, head.weight.detach(), torch.tensor([1]))
        tensor([-0.4076])
    """
    return linear_token_statistics(
        hidden,
        weight,
        targets,
        bias=bias,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        shard=shard,
        shift=shift,
        ignore_index=ignore_index,
        support=support,
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
    shard: VocabShard | None = None,
    shift: bool = False,
    ignore_index: int = -100,
    support: Support | None = None,
) -> TokenStatistics:
    """Return the log-probability, log-sum-exp and other statistics of each token under the LM head's softmax.

    Logits are ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``, computed tile by tile in
    float32 both forward and backward (the method of "Cut Your Losses", arXiv:2411.09009), so that bfloat16
    inputs lose nothing to bfloat16 logits.

    Args:
        hidden: ``[batch, seq, features]`` or ``[tokens, features]``, floating point.  A plain tensor that is the same
            on every rank of the vocabulary's axis, or a DTensor that is replicated or (sequence parallelism) sharded
            on the tokens there; a sharded one is gathered, and its gradient reduce-scattered.
        weight: ``[vocab, features]``, floating point: a plain tensor; a DTensor whose rows are sharded over one axis
            of its mesh; or, with ``shard``, a local shard.  Its other axes must be replicated: use an FSDP head while
            it is unsharded.
        targets: integers of hidden's leading shape: the full batch, or the tokens that this rank has after the gather.
            Plain or DTensor.
        entropy: also compute the entropy.
        argmax: also compute the most probable token.
        bias: ``[vocab]``, with the placements of the weight's rows.
        logit_scale: factor on the products (Cohere, Granite).
        softcap: positive bound of the logits (Gemma 2).
        temperature: positive number, or positive tensor that broadcasts to this rank's targets.
        shard: which ids the rows of a local weight are, or how many ids are no padding; see ``VocabShard``.
        shift: take ``targets`` as token ids and score position ``i`` against token ``i + 1``; the last
            position gets 0.
        ignore_index: target of tokens that are not scored: values 0 and gradient 0, whatever their hidden states.
        support: normalise over the ids that the sampler kept, one row per target; for the full batch, or for the tokens
            that this rank has after the gather.  All statistics are those of the kept ids.  Small sets read the kept
            rows of the head and no others, large ones compute all logits of a few tokens at a time, whichever costs
            less; only kept rows have a gradient.

    Returns:
        The statistics.  All are differentiable except ``argmax``; ``target_rank`` is None.

    Raises:
        ShapeError: the shapes or widths contradict each other.
        PlacementError: hidden is sharded on the features, the weight on something else than its rows, or bias or
            targets are placed differently from weight or hidden.
        DtypeError: hidden, weight or bias is not floating point, or the targets are not integers.
        OptionError: an option is outside its range, or options contradict each other.
        TargetError: a target is outside the vocabulary or its kept set.
        SupportError: the kept set of a scored token is empty, or contains an id outside the vocabulary.  All errors are
            raised before any collective starts.

    Example:
        >>> import torch
        >>> from rl_logprobs import linear_token_statistics
        >>> weight = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> found = linear_token_statistics(torch.tensor([[1.0, 2.0]]), weight, torch.tensor([2]), entropy=True)
        >>> found.logprobs, found.entropy
        (tensor([-1.4076]), tensor([0.8324]))
    """
    _check_dtypes(hidden, weight, bias)
    _check_shapes(hidden, weight, bias)
    require_same_device(hidden=hidden, weight=weight, bias=bias, targets=targets)
    _check_logit_options(logit_scale, softcap)
    vocab = _locate_weight(weight, shard)
    tokens = _tokens_after_gather(hidden, vocab.group)
    scored = scored_targets(targets, tokens, vocab.vocab_size, shift=shift, ignore_index=ignore_index)
    options = SoftmaxOptions(check_temperature(temperature, scored.ids), entropy, argmax)
    return score(_LMHeadLogits(hidden, weight, bias, tokens, vocab, logit_scale, softcap), scored, support, options)


@dataclass(frozen=True)
class _LMHeadLogits:
    """Hidden states and an LM head as a source of statistics."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    tokens: TokenSlice
    vocab: VocabColumns
    logit_scale: float
    softcap: float | None

    def full_statistics(self, targets: Targets, options: SoftmaxOptions) -> SoftmaxStatistics:
        operands, head = self._gathered()
        return linear_softmax_statistics(*operands, targets.flat_ids, targets.flat_ignored, head, options)

    def entry_logits(self, entries: KeptEntries) -> torch.Tensor:
        operands, head = self._gathered()
        return kept_linear_logits(*operands, entries, head)

    def _gathered(self) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], LMHead]:
        """Return hidden states of all tokens and this rank's rows of the head, and how its logits are computed."""
        rows, reduce_hidden_grad = _gather_tokens(self.hidden, self.vocab.group)
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else self.bias
        head = LMHead(self.vocab, self.logit_scale, self.softcap, reduce_hidden_grad)
        return (rows.reshape(-1, rows.shape[-1]), weight, bias), head


def _check_dtypes(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise DtypeError(f"{name} must be floating point, got {tensor.dtype}")


def _check_shapes(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if hidden.dim() < 2 or 0 in hidden.shape[:-1]:
        raise ShapeError(f"hidden must be [..., tokens, features] with at least one token, got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ShapeError(
            f"weight must be [vocab, {hidden.shape[-1]}] for hidden {tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if bias is None:
        return
    if isinstance(bias, DTensor) != isinstance(weight, DTensor) or bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"bias {tuple(bias.shape)} must have one element per row of weight {tuple(weight.shape)}, and both must be "
            f"DTensors or both local"
        )
    if isinstance(bias, DTensor) and isinstance(weight, DTensor) and bias.placements != weight.placements:
        raise PlacementError(
            f"bias has {bias.placements} and weight {weight.placements}; give them the same placements"
        )


def _check_logit_options(logit_scale: float, softcap: float | None) -> None:
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise OptionError(f"softcap must be positive and finite, got {softcap}; leave it out for no cap")
    if not math.isfinite(logit_scale):
        raise OptionError(f"logit_scale must be finite, got {logit_scale}")


def _locate_weight(weight: torch.Tensor, shard: VocabShard | None) -> VocabColumns:
    if not isinstance(weight, DTensor):
        return columns_of_plain(weight.shape[0], shard)
    sharded = sum(not isinstance(placement, Replicate) for placement in weight.placements)
    if sharded > 1 or weight.to_local().shape[1] != weight.shape[1]:
        raise PlacementError(
            f"weight has {weight.placements}; only its rows may be sharded, over one axis (the vocabulary's), "
            f"so call this while an FSDP head is unsharded (module.unshard(), or inside forward)"
        )
    return columns_of_dtensor(weight, 0, shard)


def _vocab_mesh_dim(hidden: DTensor, group: dist.ProcessGroup | None) -> int | None:
    """Return the dim of hidden's mesh with the ranks of the vocabulary's group; None without a group."""
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    mesh = hidden.device_mesh
    for dim in range(mesh.ndim):
        if dist.get_process_group_ranks(mesh.get_group(dim)) == ranks:
            return dim
    raise PlacementError(
        f"the weight's vocabulary is sharded over ranks {ranks}, which hidden's mesh {mesh} has no axis for; place "
        f"hidden on a mesh with that axis, or pass its local tensor"
    )


def _gathered_placements(hidden: DTensor, vocab_dim: int | None) -> list[Placement]:
    """Return hidden's placements after the gather over the vocabulary's axis."""
    placements = list(hidden.placements)
    if vocab_dim is not None:
        placements[vocab_dim] = Replicate()
    for placement in placements:
        if isinstance(placement, Partial) or getattr(placement, "dim", 0) % hidden.dim() == hidden.dim() - 1:
            raise PlacementError(
                f"hidden has {hidden.placements}; every rank must hold all features of its tokens, so "
                f"redistribute it to Replicate() or to a shard of the tokens"
            )
    return placements


def _tokens_after_gather(hidden: torch.Tensor, group: dist.ProcessGroup | None) -> TokenSlice:
    if not isinstance(hidden, DTensor):
        return TokenSlice.all_of(hidden.shape[:-1])
    return token_slice(hidden, _gathered_placements(hidden, _vocab_mesh_dim(hidden, group)))


def _gather_tokens(hidden: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, bool]:
    """Return hidden states of all tokens of the vocabulary's group, and whether their gradient needs an all-reduce.

    The gradient of gathered tokens is returned as a partial sum, which the backward pass of the gather reduce-scatters.
    """
    if not isinstance(hidden, DTensor):
        return hidden, True
    vocab_dim = _vocab_mesh_dim(hidden, group)
    placements = _gathered_placements(hidden, vocab_dim)
    if vocab_dim is None or not isinstance(hidden.placements[vocab_dim], Shard):
        return hidden.redistribute(placements=placements).to_local(), True
    grad_placements = [Partial() if dim == vocab_dim else placement for dim, placement in enumerate(placements)]
    return hidden.redistribute(placements=placements).to_local(grad_placements=grad_placements), False
