"""Softmax statistics over a vocabulary that is sharded across ranks: one collective forward, none backward.

Every rank reduces its columns to a few numbers per token, one all-gather exchanges them, and every rank computes the
statistics.  The backward pass needs no collective, because a rank's gradient depends on its own columns and the
statistics only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from rl_logprobs._torch_compat import all_gather_single, apply_function, first_derivative
from rl_logprobs.softmax.log2_scale import TemperatureScale, rescale_exponent
from rl_logprobs.softmax.partial_softmax import LogitGradient, PartialSoftmax, SoftmaxOptions, TargetColumns, merge
from rl_logprobs.softmax.torch_kernels import reduce_logits, target_logits, write_gradient
from rl_logprobs.softmax.vocab_shard import VocabColumns

#: A gradient for each tensor; None where none is needed.
Gradients = tuple[torch.Tensor | None, ...]


class TokenStatistics(NamedTuple):
    """Statistics of each token's distribution; float32 (float64 for float64 logits), in nats.

    Every field has the shape of the logits' leading dims and is 0 where the target is ``ignore_index``.

    Example:
        >>> import torch
        >>> from rl_logprobs import TokenStatistics, token_statistics
        >>> isinstance(token_statistics(torch.zeros(2, 9), torch.tensor([0, 1])), TokenStatistics)
        True
    """

    logprobs: torch.Tensor  # log-probability of the target
    logsumexp: torch.Tensor  # log of the partition sum; its square is the z-loss of PaLM (arXiv:2204.02311, section 5)
    entropy: torch.Tensor | None = None  # entropy of the distribution, or None if it was not requested
    # the most probable vocabulary id (the lowest of several), int64, or None if it was not requested
    argmax: torch.Tensor | None = None
    # number of tokens with a larger logit than the target (0: none is more probable), int64, or None if it was not
    # requested
    target_rank: torch.Tensor | None = None


class SoftmaxTotals(NamedTuple):
    """Values over the full vocabulary, ``[tokens]``, that the backward pass needs."""

    target_masked: torch.Tensor  # the target's logit is ``-inf``, so its log-probability is too and has no gradient
    max_logit: torch.Tensor  # the largest logit
    sum_exp2: torch.Tensor  # the sum of ``2**y``
    mean_exponent: torch.Tensor | None  # the expectation of ``y`` under the softmax, or None without entropy


def all_gather(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the ranks' ``[quantities, tokens]`` stacked to ``[ranks, quantities, tokens]``, in one collective."""
    if group is None:
        return part[None]
    ranks = dist.get_world_size(group)
    gathered = part.new_empty(ranks * part.shape[0], *part.shape[1:])
    all_gather_single(gathered, part, group)
    return gathered.view(ranks, *part.shape)


def combine_ranks(
    local: PartialSoftmax, ignored: torch.Tensor, scale: TemperatureScale, group: dist.ProcessGroup | None
) -> tuple[TokenStatistics, SoftmaxTotals]:
    """Exchange the ranks' contributions in one collective and compute the statistics."""
    dtype = local.max_logit.dtype
    total = merge(local.unstack(all_gather(local.stack(), group)), scale)
    totals = SoftmaxTotals(
        target_masked=total.target_logit == -math.inf,
        max_logit=total.max_logit.to(dtype),
        sum_exp2=total.sum_exp2,
        mean_exponent=None if total.weighted_sum is None else total.weighted_sum / total.sum_exp2,
    )
    log2_sum = total.sum_exp2.log2()

    def zero_ignored(value: torch.Tensor) -> torch.Tensor:
        return value.masked_fill(ignored, 0).to(dtype)

    statistics = TokenStatistics(
        logprobs=zero_ignored(total.logprobs(total.target_logit, scale)),
        logsumexp=zero_ignored(total.max_logit * scale.inv_temperature + log2_sum * scale.ln_factor),
        entropy=None
        if totals.mean_exponent is None
        else zero_ignored((log2_sum - totals.mean_exponent) * scale.ln_factor),
        argmax=None if total.argmax is None else total.argmax.long().masked_fill(ignored, 0),
        target_rank=None if total.num_greater is None else total.num_greater.long().masked_fill(ignored, 0),
    )
    return statistics, totals


def logit_gradient(
    totals: SoftmaxTotals,
    ignored: torch.Tensor,
    scale: TemperatureScale,
    gradients: Sequence[torch.Tensor | None],
    min_logit: torch.Tensor | None = None,
) -> LogitGradient:
    """Return the coefficients of the logits' gradient from gradients of log-probability, log-sum-exp and entropy."""
    target_masked, max_logit, sum_exp2, mean_exponent = totals
    zero = sum_exp2.new_zeros(sum_exp2.shape)
    d_logprobs, d_logsumexp, d_entropy = (zero if g is None else g.to(sum_exp2.dtype) for g in gradients[:3])
    d_logprobs = d_logprobs.masked_fill(target_masked, 0)
    d_weight, d_weighted = d_logsumexp - d_logprobs, None
    if mean_exponent is not None and gradients[2] is not None:
        d_weight = d_weight + d_entropy * scale.ln_factor * mean_exponent
        d_weighted = (-d_entropy * scale.ln_factor * scale.inv_temperature / sum_exp2).to(max_logit.dtype)
    return LogitGradient(
        max_logit=max_logit,
        weight=(d_weight * scale.inv_temperature / sum_exp2).to(max_logit.dtype),
        weighted=d_weighted,
        target=(d_logprobs * scale.inv_temperature).to(max_logit.dtype),
        ignored=ignored,
        min_logit=min_logit,
    )


class Reducer(Protocol):
    """A method to compute statistics of tensors, and the gradients of these tensors."""

    def statistics(
        self, tensors: tuple[Any, ...], needed: Sequence[bool]
    ) -> tuple[TokenStatistics, Sequence[torch.Tensor | None]]:
        """Return the statistics of the tensors, and the tensors to save for the gradients."""

    def gradients(self, saved: Sequence[Any], needed: Sequence[bool], gradients: Gradients) -> Gradients:
        """Return the gradient of each tensor from the gradients of the statistics."""


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reducer: Reducer, *tensors: torch.Tensor | None) -> TokenStatistics:
        statistics, saved = reducer.statistics(tensors, ctx.needs_input_grad[1:])
        ctx.save_for_backward(*saved)
        ctx.reducer = reducer
        ctx.set_materialize_grads(False)
        integers = (statistics.argmax, statistics.target_rank)
        ctx.mark_non_differentiable(*(value for value in integers if value is not None))
        return statistics

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
        return None, *ctx.reducer.gradients(ctx.saved_tensors, ctx.needs_input_grad[1:], gradients)


def statistics_by(reducer: Reducer, *tensors: torch.Tensor | None) -> TokenStatistics:
    """Return a reducer's statistics of tensors, differentiable in these tensors."""
    return TokenStatistics(*apply_function(_Statistics, reducer, *tensors))


@dataclass(frozen=True)
class LogitReducer:
    """Statistics of the full softmax, ``[tokens]``, from this rank's columns of logits of any strides."""

    # Ignored tokens get 0 and have no gradient, whatever their logits. The ranks of the shard's group call together.
    shard: VocabColumns
    options: SoftmaxOptions
    scale: TemperatureScale

    def statistics(
        self, tensors: tuple[Any, ...], needed: Sequence[bool]
    ) -> tuple[TokenStatistics, Sequence[torch.Tensor | None]]:
        """Return the statistics of logits, ids ``[tokens]`` and the tokens to ignore, with the tensors to save."""
        logits, targets, ignored = tensors
        shard, options = self.shard, self.options
        columns = TargetColumns.locate(targets, ignored, shard.start, shard.width)
        local_logits = logits[..., : shard.width]
        greater_than = None
        if options.target_rank:  # one rank holds the target's logit, and the others need it before they can count
            greater_than = all_gather(target_logits(local_logits, columns)[None], shard.group).sum(0)[0]
        local = reduce_logits(local_logits, columns, self.scale, shard.start, options, greater_than)
        statistics, totals = combine_ranks(local, ignored, self.scale, shard.group)
        rescale = None
        if options.inplace_forward:  # the weights that replace the logits are relative to the local maximum
            rescale = rescale_exponent(local.max_logit.to(totals.sum_exp2.dtype), totals.max_logit, self.scale)
        # Autograd refuses to return a saved input that is a view made by another function and has been overwritten.
        saved_logits = logits.detach() if options.inplace_forward else logits
        return statistics, (saved_logits, ignored, options.min_logit, rescale, *columns, *totals)

    def gradients(self, saved: Sequence[Any], needed: Sequence[bool], gradients: Gradients) -> Gradients:
        """Return the gradient of the logits."""
        logits, ignored, min_logit, rescale, column, owned, *totals = saved
        width, options = self.shard.width, self.options
        out = logits if options.inplace_backward or options.inplace_forward else logits.new_empty(logits.shape)
        out[..., width:].zero_()
        gradient = logit_gradient(SoftmaxTotals(*totals), ignored, self.scale, gradients, min_logit)
        gradient = gradient if rescale is None else gradient.for_weights(rescale)
        write_gradient(logits[..., :width], TargetColumns(column, owned), gradient, self.scale, out[..., :width])
        return out, None, None
