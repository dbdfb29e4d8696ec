"""Softmax statistics of vocabulary-sharded logits: one pass over the logits and one collective.

Every rank reduces its own columns to a few numbers a token (peak, sum of exponentials, target logit, first
moment); one all-gather exchanges them and every rank combines them.  The backward pass needs no collective,
because each rank's gradient depends only on its own columns and the combined statistics.

The sums are relative to each rank's own peak and rescaled when they meet ("online softmax": Milakov and
Gimelshein, arXiv:1805.02867).  They are in base 2, because on a CPU a power of two costs half as much as an
exponential, and combined in float64, which is free at one number a token and keeps the difference of two large
logarithms exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_logprobs._torch_compat import apply_function
from rl_logprobs.layout import VocabShard
from rl_logprobs.rows import row_blocks, rows_that_fit, statistics_dtype, wide_dtype

#: Exponents of two below this are zero in float64 too; the clamp keeps ``0 * -inf`` out of the moments.
FLOOR = -1e5


@dataclass(frozen=True)
class SoftmaxOptions:
    """What to compute besides log-probabilities and log-sum-exp, and how.

    ``temperature`` is a number or one number a token (flat).  With ``inplace_backward`` the gradient is
    written over the logits.
    """

    temperature: float | torch.Tensor = 1.0
    entropy: bool = False
    inplace_backward: bool = False


class SoftmaxStatistics(NamedTuple):
    """Per token, flat, in the statistics dtype and in nats."""

    logprobs: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor | None


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
    return SoftmaxStatistics(*apply_function(_VocabParallelSoftmax, logits, targets, ignored, shard, options))


class Scale(NamedTuple):
    """``exp(x / T) = 2 ** (x * exponent)`` with the exponent as rounded to the statistics dtype.

    ``nats`` turns base-2 logarithms back (it undoes the rounding too) and ``slope`` is ``1 / T``.
    """

    exponent: float | torch.Tensor
    nats: float | torch.Tensor
    slope: float | torch.Tensor

    def exponent_of(self, rows: slice) -> float | torch.Tensor:
        """The exponent as a factor for a block of rows."""
        return self.exponent if isinstance(self.exponent, float) else self.exponent[rows, None]


def _scale(temperature: float | torch.Tensor, dtype: torch.dtype) -> Scale:
    if isinstance(temperature, torch.Tensor):
        wide = temperature.to(wide_dtype(temperature.device))
        exponent = (math.log2(math.e) / wide).to(dtype)
        return Scale(exponent, 1 / (exponent.to(wide.dtype) * wide), 1 / wide)
    rounded = torch.tensor(math.log2(math.e) / temperature, dtype=dtype).item()
    return Scale(rounded, 1 / (rounded * temperature), 1 / temperature)


class _LocalSums(NamedTuple):
    """What one rank's columns contribute, ``[tokens]`` each; ``moment`` is the sum of ``2**y * y``."""

    peak: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor
    moment: torch.Tensor | None


class _Combined(NamedTuple):
    """The same over the whole vocabulary, ``peak`` in the statistics dtype and the others wide.

    ``gap`` is the target logit less the peak, ``mean`` the expectation of ``y`` (both relative to the peak).
    """

    peak: torch.Tensor
    total: torch.Tensor
    gap: torch.Tensor
    mean: torch.Tensor | None


def _local_sums(
    logits: torch.Tensor, columns: torch.Tensor, owned: torch.Tensor, scale: Scale, with_moment: bool
) -> _LocalSums:
    dtype, tokens, width = statistics_dtype(logits.dtype), columns.shape[0], logits.shape[-1]
    peak, total, target, moment = logits.new_zeros(4, tokens, dtype=dtype).unbind(0)
    if width == 0:
        return _LocalSums(peak.fill_(-math.inf), total, target, moment if with_moment else None)
    rows = min(tokens, rows_that_fit(width, logits.device))
    powers = logits.new_empty(rows, width, dtype=dtype)
    weighted = torch.empty_like(powers) if with_moment else None
    for span, (block,) in row_blocks(rows, logits):
        power = powers[: block.shape[0]]
        values = block if block.dtype is dtype else power.copy_(block)
        torch.amax(values, -1, out=peak[span])
        torch.gather(values, 1, columns[span, None], out=target[span, None])
        _exponents(values, peak[span], scale.exponent_of(span), out=power)
        if weighted is None:
            torch.sum(power.exp2_(), -1, out=total[span])
        else:
            weight = weighted[: block.shape[0]]
            torch.exp2(power.clamp_(min=FLOOR), out=weight)
            torch.sum(weight, -1, out=total[span])
            torch.sum(weight.mul_(power), -1, out=moment[span])
    return _LocalSums(peak, total, target.masked_fill_(~owned, 0), moment if with_moment else None)


def _exponents(
    values: torch.Tensor, peak: torch.Tensor, exponent: float | torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """``y = (x - peak) * exponent``; a row that is ``-inf`` throughout keeps ``-inf`` instead of NaN."""
    finite_peak = peak.masked_fill(peak == -math.inf, 0)
    return torch.sub(values, finite_peak[:, None], out=out).mul_(exponent)


def _combine(local: _LocalSums, scale: Scale, group: dist.ProcessGroup | None) -> _Combined:
    parts = torch.stack([part for part in local if part is not None])
    ranks = 1 if group is None else dist.get_world_size(group)
    gathered = parts.new_empty(ranks, *parts.shape)
    if group is None:
        gathered[0] = parts
    else:
        dist.all_gather_into_tensor(gathered.view(-1, parts.shape[1]), parts, group=group)
    peaks, totals, targets, *moments = gathered.to(wide_dtype(parts.device)).unbind(1)
    peak = peaks.amax(0)
    peak = peak.masked_fill(peak == -math.inf, 0)
    lag = ((peaks - peak) * scale.exponent).clamp(min=FLOOR)
    weights = lag.exp2()
    total = (totals * weights).sum(0)
    mean = ((moments[0] + totals * lag) * weights).sum(0) / total if moments else None
    return _Combined(peak.to(parts.dtype), total, targets.sum(0) - peak, mean)


class _VocabParallelSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        ignored: torch.Tensor,
        shard: VocabShard,
        options: SoftmaxOptions,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        dtype = statistics_dtype(logits.dtype)
        scale = _scale(options.temperature, dtype)
        relative = targets - shard.start
        owned = (relative >= 0) & (relative < shard.width) & ~ignored
        columns = relative.clamp(0, max(0, shard.width - 1))
        local = _local_sums(logits[..., : shard.width], columns, owned, scale, options.entropy)
        whole = _combine(local, scale, shard.group)
        log_total = whole.total.log2()
        outputs = [
            (whole.gap * scale.exponent - log_total) * scale.nats,
            whole.peak * scale.slope + log_total * scale.nats,
        ]
        if whole.mean is not None:
            outputs.append((log_total - whole.mean) * scale.nats)
        ctx.save_for_backward(logits, columns, owned, ignored, whole.peak, whole.total, whole.mean)
        ctx.shard, ctx.options, ctx.scale = shard, options, scale
        ctx.set_materialize_grads(False)
        logprobs, logsumexp, *entropy = (value.masked_fill(ignored, 0).to(dtype) for value in outputs)
        return logprobs, logsumexp, entropy[0] if entropy else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_logprobs: torch.Tensor | None,
        d_logsumexp: torch.Tensor | None,
        d_entropy: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        logits, columns, owned, ignored, peak, total, mean = ctx.saved_tensors
        scale: Scale = ctx.scale
        d_target = total.new_zeros(total.shape) if d_logprobs is None else d_logprobs.to(total.dtype)
        d_power = -d_target if d_logsumexp is None else d_logsumexp - d_target
        d_moment = None
        if d_entropy is not None:
            d_moment = -d_entropy * scale.nats
            d_power = d_power - d_moment * mean
            d_moment = (d_moment * scale.slope / total).to(peak.dtype)
        gradient = _Gradient(
            columns=columns,
            ignored=ignored,
            peak=peak,
            target=(d_target * scale.slope).masked_fill(~owned, 0).to(peak.dtype),
            power=(d_power * scale.slope / total).to(peak.dtype),
            moment=d_moment,
        )
        out = logits if ctx.options.inplace_backward else logits.new_empty(logits.shape)
        _write_gradient(logits, gradient, scale, ctx.shard.width, out)
        return out, None, None, None, None


class _Gradient(NamedTuple):
    """Per token: ``d x_j = 2**y_j * (power + moment * y_j) + [j is the target] * target``."""

    columns: torch.Tensor
    ignored: torch.Tensor
    peak: torch.Tensor
    target: torch.Tensor
    power: torch.Tensor
    moment: torch.Tensor | None


def _write_gradient(logits: torch.Tensor, gradient: _Gradient, scale: Scale, width: int, out: torch.Tensor) -> None:
    out[..., width:].zero_()
    if width == 0:
        return
    rows = min(gradient.peak.shape[0], rows_that_fit(width, logits.device))
    powers = logits.new_empty(rows, width, dtype=gradient.peak.dtype)
    weights = None if gradient.moment is None else torch.empty_like(powers)
    for span, (block, sink) in row_blocks(rows, logits[..., :width], out[..., :width]):
        power = powers[: block.shape[0]]
        values = block if block.dtype is power.dtype else power.copy_(block)
        _exponents(values, gradient.peak[span], scale.exponent_of(span), out=power)
        if weights is None or gradient.moment is None:
            power.exp2_().mul_(gradient.power[span, None])
        else:
            weight = torch.exp2(power.clamp_(min=FLOOR), out=weights[: block.shape[0]])
            power.mul_(gradient.moment[span, None]).add_(gradient.power[span, None]).mul_(weight)
        power.scatter_add_(1, gradient.columns[span, None], gradient.target[span, None])
        sink.copy_(power)
        _zero_rows_(sink, gradient.ignored[span])


def _zero_rows_(block: torch.Tensor, mask: torch.Tensor) -> None:
    if block.device.type == "cpu":  # finding the rows is cheap where it needs no synchronisation
        block.index_fill_(0, mask.nonzero().squeeze(1), 0)
    else:
        block.masked_fill_(mask[:, None], 0)
