"""Softmax statistics over a vocabulary that is split across ranks: one collective forward, none backward.

Every rank reduces its own columns to a few sums a token; one all-gather exchanges them and every rank finishes
the statistics.  The backward pass needs no collective, because a rank's gradient depends only on its own
columns and the finished statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_logprobs._torch_compat import all_gather_into, apply_function
from rl_logprobs.backends import TORCH, Kernels
from rl_logprobs.layout import VocabShard
from rl_logprobs.powers import Scale, peak_lag
from rl_logprobs.rows import statistics_dtype
from rl_logprobs.softmax import (
    LogitGradient,
    Sums,
    TargetColumns,
    merge,
    target_logits,
)


@dataclass(frozen=True)
class SoftmaxOptions:
    """What to compute besides log-probabilities and log-sum-exp, and how.

    ``temperature`` is a number or one number a token (flat).  Logits below ``floor`` (one a token, flat) have no
    probability.  With ``inplace_backward`` the gradient is written over the logits, and with ``inplace_forward``
    their weights are before that; the gradient of the entropy cannot be had from them.  ``kernels`` do the arithmetic.
    """

    temperature: float | torch.Tensor = 1.0
    entropy: bool = False
    argmax: bool = False
    rank: bool = False
    floor: torch.Tensor | None = None
    inplace_backward: bool = False
    inplace_forward: bool = False
    kernels: Kernels = TORCH


class SoftmaxStatistics(NamedTuple):
    """Per token, flat, in the statistics dtype and in nats; ``argmax`` (an id) and ``rank`` (a count) are int64."""

    logprobs: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor | None
    argmax: torch.Tensor | None
    rank: torch.Tensor | None


class Finished(NamedTuple):
    """What the backward pass needs of the whole vocabulary, per token.

    ``mean`` is the expectation of ``y``.  Where the target is ``impossible``, its log-probability is ``-inf`` and
    sends no gradient.
    """

    impossible: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    mean: torch.Tensor | None


def softmax_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignored: torch.Tensor,
    shard: VocabShard,
    options: SoftmaxOptions,
) -> SoftmaxStatistics:
    """Statistics of the softmax over the whole vocabulary, from this rank's columns.

    Args:
        logits: ``[..., columns]``, this rank's columns, any floating dtype and strides.
        targets: ``[tokens]`` vocabulary ids in the order of the flattened leading dims.
        ignored: ``[tokens]`` bool; those tokens get zeros and send no gradient, whatever their logits.
        shard: which columns these are; the ranks of its group call together.
        options: what to compute.
    """
    return SoftmaxStatistics(*apply_function(_FromLogits, logits, targets, ignored, shard, options))


def all_gather(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The ranks' ``[quantities, tokens]`` stacked to ``[ranks, quantities, tokens]``, in one collective."""
    if group is None:
        return part[None]
    ranks = dist.get_world_size(group)
    gathered = part.new_empty(ranks * part.shape[0], *part.shape[1:])
    all_gather_into(gathered, part, group)
    return gathered.view(ranks, *part.shape)


def finish(
    local: Sums, ignored: torch.Tensor, scale: Scale, group: dist.ProcessGroup | None
) -> tuple[SoftmaxStatistics, Finished]:
    """Exchange the ranks' sums in one collective and turn them into statistics."""
    dtype = local.peak.dtype
    whole = merge(local.unstack(all_gather(local.stack(), group)), scale)
    finished = Finished(
        impossible=whole.target == -math.inf,
        peak=whole.peak.to(dtype),
        total=whole.total,
        mean=None if whole.moment is None else whole.moment / whole.total,
    )
    log_total = whole.total.log2()
    gap = (whole.target - whole.peak) * scale.exponent

    def shown(value: torch.Tensor) -> torch.Tensor:
        return value.masked_fill(ignored, 0).to(dtype)

    statistics = SoftmaxStatistics(
        logprobs=shown((gap - log_total) * scale.nats),
        logsumexp=shown(whole.peak * scale.slope + log_total * scale.nats),
        entropy=None if finished.mean is None else shown((log_total - finished.mean) * scale.nats),
        argmax=None if whole.best is None else whole.best.long().masked_fill(ignored, 0),
        rank=None if whole.larger is None else whole.larger.long().masked_fill(ignored, 0),
    )
    return statistics, finished


def logit_gradient(
    finished: Finished,
    ignored: torch.Tensor,
    scale: Scale,
    gradients: Sequence[torch.Tensor | None],
    floor: torch.Tensor | None = None,
) -> LogitGradient:
    """What the gradients of log-probability, log-sum-exp and entropy mean for a logit."""
    impossible, peak, total, mean = finished
    zero = total.new_zeros(total.shape)
    d_logprobs, d_logsumexp, d_entropy = (zero if g is None else g.to(total.dtype) for g in gradients[:3])
    d_logprobs = d_logprobs.masked_fill(impossible, 0)
    d_power, d_moment = d_logsumexp - d_logprobs, None
    if mean is not None and gradients[2] is not None:
        d_power = d_power + d_entropy * scale.nats * mean
        d_moment = (-d_entropy * scale.nats * scale.slope / total).to(peak.dtype)
    return LogitGradient(
        peak=peak,
        power=(d_power * scale.slope / total).to(peak.dtype),
        moment=d_moment,
        target=(d_logprobs * scale.slope).to(peak.dtype),
        ignored=ignored,
        floor=floor,
    )


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        ignored: torch.Tensor,
        shard: VocabShard,
        options: SoftmaxOptions,
    ) -> SoftmaxStatistics:
        scale = Scale.of(options.temperature, statistics_dtype(logits.dtype))
        columns = TargetColumns.among(targets, ignored, shard.start, shard.width)
        mine, overwrite = logits[..., : shard.width], options.inplace_forward
        sought = None
        if options.rank:  # the others cannot count before they know what the one rank alone knows
            sought = all_gather(target_logits(mine, columns)[None], shard.group).sum(0)[0]
        local = options.kernels.column_sums(
            mine,
            columns,
            scale,
            shard.start,
            moment=options.entropy,
            best=options.argmax,
            sought=sought,
            floor=options.floor,
            overwrite=overwrite,
        )
        statistics, finished = finish(local, ignored, scale, shard.group)
        lag = peak_lag(local.peak.to(finished.total.dtype), finished.peak, scale) if overwrite else None
        # Autograd refuses to hand back an input that is some function's view and has been overwritten: save another.
        kept = logits.detach() if overwrite else logits
        ctx.save_for_backward(kept, ignored, options.floor, lag, *columns, *finished)
        ctx.scale, ctx.width, ctx.inplace = scale, shard.width, options.inplace_backward or overwrite
        ctx.kernels = options.kernels
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(found for found in (statistics.argmax, statistics.rank) if found is not None))
        return statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        logits, ignored, floor, lag, column, owned, *finished = ctx.saved_tensors
        out = logits if ctx.inplace else logits.new_empty(logits.shape)
        out[..., ctx.width :].zero_()
        gradient = logit_gradient(Finished(*finished), ignored, ctx.scale, gradients, floor)
        ctx.kernels.write_gradient(
            logits[..., : ctx.width],
            TargetColumns(column, owned),
            gradient if lag is None else gradient.of_weights(lag),
            ctx.scale,
            out[..., : ctx.width],
        )
        return out, None, None, None, None
