"""The softmax arithmetic on the columns that one rank holds: sums forward, the gradient backward.

Sums are relative to the peak of the columns that they cover and rescaled when they meet others ("online
softmax": Milakov and Gimelshein, arXiv:1805.02867).  They are in base 2, because on a CPU a power of two costs
half as much as an exponential, and they meet in float64, which is free at one number a token and keeps the
difference of two large logarithms exact.

Notation: ``x`` a logit, ``y = (x - peak) / T * log2(e)``, so that a column's weight is ``2**y``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_logprobs.rows import row_blocks, rows_that_fit, statistics_dtype, wide_dtype

#: Two to a power below this is zero in float64 too; the clamp keeps ``0 * -inf`` out of the moments.
FLOOR = -1e5


class Scale(NamedTuple):
    """The temperature in base 2, for all tokens (numbers) or one by one (tensors ``[tokens]``).

    ``exponent`` turns logits into powers of two, rounded to the statistics dtype; ``nats`` turns base-2
    logarithms back and undoes that rounding; ``slope`` is ``1 / T``.
    """

    exponent: float | torch.Tensor
    nats: float | torch.Tensor
    slope: float | torch.Tensor

    @classmethod
    def of(cls, temperature: float | torch.Tensor, dtype: torch.dtype) -> Scale:
        """The scale of a positive temperature for statistics in ``dtype``."""
        if isinstance(temperature, torch.Tensor):
            wide = temperature.to(wide_dtype(temperature.device))
            exponents = (math.log2(math.e) / wide).to(dtype)
            return cls(exponents, 1 / (exponents.to(wide.dtype) * wide), 1 / wide)
        exponent = torch.tensor(math.log2(math.e) / temperature, dtype=dtype).item()
        return cls(exponent, 1 / (exponent * temperature), 1 / temperature)

    def rows(self, span: slice) -> Scale:
        """The scale of some of the tokens."""
        if isinstance(self.exponent, float):
            return self
        return Scale(*(value if isinstance(value, float) else value[span] for value in self))


class TargetColumns(NamedTuple):
    """Where each token's target lies in the columns at hand, ``[tokens]``; 0 where ``owned`` is false."""

    column: torch.Tensor
    owned: torch.Tensor

    @classmethod
    def among(cls, targets: torch.Tensor, ignored: torch.Tensor, start: int, width: int) -> TargetColumns:
        """The targets' places among the vocabulary ids ``[start, start + width)``."""
        column = targets - start
        owned = (column >= 0) & (column < width) & ~ignored
        return cls(column.where(owned, 0), owned)

    def rows(self, span: slice) -> TargetColumns:
        """Those of some of the tokens."""
        return TargetColumns(self.column[span], self.owned[span])


class Sums(NamedTuple):
    """What some columns contribute to each token, ``[..., tokens]``.

    ``peak`` is their largest logit, ``total`` the sum of ``2**y``, ``target`` the target's logit if it is among
    them (else 0), ``moment`` the sum of ``2**y * y`` and ``best`` the lowest vocabulary id at the peak.
    """

    peak: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor
    moment: torch.Tensor | None
    best: torch.Tensor | None

    def stack(self) -> torch.Tensor:
        """All that is there, ``[quantities, tokens]``, in the peak's dtype (exact for ids below 2**24)."""
        return torch.stack([value.to(self.peak.dtype) for value in self if value is not None])

    def to(self, dtype: torch.dtype) -> Sums:
        """The same in another dtype."""
        return self.unstack(self.stack().to(dtype))

    def unstack(self, stacked: torch.Tensor) -> Sums:
        """The inverse of ``stack`` for ``[..., quantities, tokens]`` from sums that hold the same quantities."""
        values = iter(stacked.unbind(-2))
        return Sums(
            peak=next(values),
            total=next(values),
            target=next(values),
            moment=None if self.moment is None else next(values),
            best=None if self.best is None else next(values),
        )


def column_sums(
    logits: torch.Tensor,
    targets: TargetColumns,
    scale: Scale,
    start: int,
    *,
    moment: bool,
    best: bool,
    floor: torch.Tensor | None = None,
) -> Sums:
    """Reduce logits ``[..., width]`` of the vocabulary ids from ``start`` to sums, reading them once.

    Logits below ``floor`` (``[tokens]``) are taken for ``-inf``.
    """
    dtype, tokens, width = statistics_dtype(logits.dtype), targets.column.shape[0], logits.shape[-1]
    peak, total, moments, target = logits.new_zeros(4, tokens, dtype=dtype).unbind(0)
    winners = targets.column.new_zeros(tokens)
    if width == 0:
        peak.fill_(-math.inf)
        return Sums(peak, total, target, moments if moment else None, winners if best else None)
    rows = min(tokens, rows_that_fit(width, logits.device))
    workspace = logits.new_empty(rows, width, dtype=dtype)
    weights = torch.empty_like(workspace) if moment else None
    for span, (block,) in row_blocks(rows, logits):
        power = workspace[: block.shape[0]]
        values = block if block.dtype is dtype else power.copy_(block)
        if best:
            torch.max(values, -1, out=(peak[span], winners[span]))
        else:
            torch.amax(values, -1, out=peak[span])
        below = None if floor is None else values < floor[span, None]
        powers(values, peak[span], scale.rows(span), out=power)
        if below is not None:
            power.masked_fill_(below, -math.inf)
        if weights is None:
            torch.sum(power.exp2_(), -1, out=total[span])
        else:
            weight = torch.exp2(power.clamp_(min=FLOOR), out=weights[: block.shape[0]])
            torch.sum(weight, -1, out=total[span])
            torch.sum(weight.mul_(power), -1, out=moments[span])
    target = logits.gather(-1, targets.column.view(*logits.shape[:-1], 1)).flatten().to(dtype)
    if floor is not None:
        target = target.masked_fill(target < floor, -math.inf)
    return Sums(
        peak=peak,
        total=total,
        target=target.where(targets.owned, 0),
        moment=moments if moment else None,
        best=winners + start if best else None,
    )


def merge(parts: Sums, scale: Scale) -> Sums:
    """Sums over disjoint columns, ``[parts, tokens]`` each, as the wide sums over all of them."""
    wide = wide_dtype(parts.peak.device)
    peaks, totals = parts.peak.to(wide), parts.total.to(wide)
    peak = peaks.amax(0)
    lag = peak_lag(peaks, peak, scale)
    weights = lag.exp2()
    moment = best = None
    if parts.moment is not None:
        moment = ((parts.moment.to(wide) + totals * lag) * weights).sum(0)
    if parts.best is not None:
        best = parts.best.where((peaks == peak) | peaks.isnan(), math.inf).amin(0)
    return Sums(peak, (totals * weights).sum(0), parts.target.to(wide).sum(0), moment, best)


def merge_all(parts: Sequence[Sums], scale: Scale) -> Sums:
    """``merge`` for separate sums."""
    return merge(parts[0].unstack(torch.stack([part.stack() for part in parts])), scale)


def peak_lag(peak: torch.Tensor, reference: torch.Tensor, scale: Scale) -> torch.Tensor:
    """The power of two that turns weights relative to one peak into weights relative to another."""
    return ((peak - _finite(reference)) * scale.exponent).clamp(min=FLOOR)


def write_weights(logits: torch.Tensor, peak: torch.Tensor, scale: Scale) -> None:
    """Replace logits ``[tokens, width]`` in the statistics dtype by their weights ``2**y``."""
    powers(logits, peak, scale, out=logits).exp2_()


def _finite(peak: torch.Tensor) -> torch.Tensor:
    """Something finite for a row that is ``-inf`` throughout, whose weights must be zero and not NaN."""
    return peak.clamp(min=torch.finfo(peak.dtype).min)


def powers(values: torch.Tensor, peak: torch.Tensor, scale: Scale, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``y`` of logits ``[tokens, width]`` relative to ``peak``; ``-inf`` throughout for a peak of ``-inf``."""
    exponent = scale.exponent if isinstance(scale.exponent, float) else scale.exponent[:, None]
    return torch.sub(values, _finite(peak)[:, None], out=out).mul_(exponent)


class LogitGradient(NamedTuple):
    """``d x_j = 2**y_j * (power + moment * y_j) + [j is the target] * target``, coefficients ``[tokens]``.

    ``target`` is ``[tokens, k]`` where the target columns are, for ``k`` targets a token.  ``ignored`` tokens get
    zero whatever their logits, and so do logits below ``floor``.
    """

    peak: torch.Tensor
    power: torch.Tensor
    moment: torch.Tensor | None
    target: torch.Tensor
    ignored: torch.Tensor
    floor: torch.Tensor | None

    def rows(self, span: slice) -> LogitGradient:
        """Those of some of the tokens."""
        return LogitGradient(
            peak=self.peak[span],
            power=self.power[span],
            moment=None if self.moment is None else self.moment[span],
            target=self.target[span],
            ignored=self.ignored[span],
            floor=None if self.floor is None else self.floor[span],
        )


def write_gradient(
    logits: torch.Tensor, targets: TargetColumns, gradient: LogitGradient, scale: Scale, out: torch.Tensor
) -> None:
    """Write the gradient of logits ``[..., width]`` to ``out``, which may be the logits themselves."""
    width = logits.shape[-1]
    if width == 0:
        return
    dtype = statistics_dtype(logits.dtype)
    rows = min(gradient.peak.shape[0], rows_that_fit(width, logits.device))
    workspace = None if out.dtype is dtype else logits.new_empty(rows, width, dtype=dtype)
    weights = None if gradient.moment is None else logits.new_empty(rows, width, dtype=dtype)
    columns = targets.column.reshape(len(gradient.peak), -1)
    at_targets = gradient.target.where(targets.owned, 0).reshape(columns.shape)
    for span, (block, sink) in row_blocks(rows, logits, out):
        power = sink if workspace is None else workspace[: block.shape[0]]
        values = block if block.dtype is dtype else power.copy_(block)
        below = None if gradient.floor is None else values < gradient.floor[span, None]
        powers(values, gradient.peak[span], scale.rows(span), out=power)
        if below is not None:
            power.masked_fill_(below, -math.inf)
        if weights is None or gradient.moment is None:
            power.exp2_().mul_(gradient.power[span, None])
        else:
            weight = torch.exp2(power.clamp_(min=FLOOR), out=weights[: block.shape[0]])
            power.mul_(gradient.moment[span, None]).add_(gradient.power[span, None]).mul_(weight)
        power.scatter_add_(1, columns[span], at_targets[span])
        if power is not sink:
            sink.copy_(power)
    _zero_tokens_(out, gradient.ignored.view(out.shape[:-1]))


def _zero_tokens_(values: torch.Tensor, mask: torch.Tensor) -> None:
    if values.device.type == "cpu":  # finding the tokens is cheap where it needs no synchronisation
        values[mask.nonzero(as_tuple=True)] = 0
    else:
        values.masked_fill_(mask.unsqueeze(-1), 0)
