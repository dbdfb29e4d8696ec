"""The softmax arithmetic on the columns that one rank holds: sums forward, the gradient backward.

Sums are relative to the peak of the columns that they cover and rescaled when they meet others ("online
softmax": Milakov and Gimelshein, arXiv:1805.02867).  They meet in float64, which is free at one number a token
and keeps the difference of two large logarithms exact.

Notation: ``x`` a logit, ``y`` its power of two relative to the peak (see ``powers``), ``2**y`` its weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_logprobs.powers import FLOOR, Scale, peak_lag, powers
from rl_logprobs.rows import row_blocks, rows_that_fit, statistics_dtype, wide_dtype

#: What share of a workspace each of two takes: entropies stay within 2 % of large logits, their gradients within 3 %.
PAIR_FORWARD, PAIR_BACKWARD = 9 / 16, 7 / 8


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
    them (else 0), ``moment`` the sum of ``2**y * y``, ``best`` the lowest vocabulary id at the peak and ``larger``
    how many logits exceed a given one.
    """

    peak: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor
    moment: torch.Tensor | None = None
    best: torch.Tensor | None = None
    larger: torch.Tensor | None = None

    def stack(self) -> torch.Tensor:
        """All that is there, ``[quantities, tokens]``, in the peak's dtype (exact for ids and counts below 2**24)."""
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
            larger=None if self.larger is None else next(values),
        )


def column_sums(
    logits: torch.Tensor,
    targets: TargetColumns,
    scale: Scale,
    start: int,
    *,
    moment: bool = False,
    best: bool = False,
    sought: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
    overwrite: bool = False,
) -> Sums:
    """Reduce logits ``[..., width]`` of the vocabulary ids from ``start`` to sums, reading them once.

    Logits below ``floor`` (``[tokens]``) are taken for ``-inf``; those above ``sought`` (``[tokens]``) are counted.
    ``overwrite`` leaves their weights, relative to ``peak``, in the logits' place.
    """
    dtype, tokens, width = statistics_dtype(logits.dtype), targets.column.shape[0], logits.shape[-1]
    target = target_logits(logits, targets)
    peak, total, moments = logits.new_zeros(3, tokens, dtype=dtype).unbind(0)
    winners, larger = targets.column.new_zeros(2, tokens).unbind(0)
    if width == 0:
        peak.fill_(-math.inf)
    rows = min(tokens, rows_that_fit(width, logits.device, share=PAIR_FORWARD if moment else 1))
    workspace = None if overwrite and logits.dtype is dtype else logits.new_empty(rows, width, dtype=dtype)
    weights = logits.new_empty(rows, width, dtype=dtype) if moment else None
    for span, (block,) in row_blocks(rows, logits) if width else ():
        power, peaks, sums = block if workspace is None else workspace[: len(block)], peak[span], total[span]
        values = block if block.dtype is dtype else power.copy_(block)
        if best:
            torch.max(values, -1, out=(peaks, winners[span]))
        else:
            torch.amax(values, -1, out=peaks)
        if sought is not None:
            torch.sum(values > sought[span, None], -1, out=larger[span])
        below = None if floor is None else values < floor[span, None]
        powers(values, peaks, scale.rows(span), out=power)
        if below is not None:
            power.masked_fill_(below, -math.inf)
        if weights is None:
            torch.sum(power.exp2_(), -1, out=sums)
        else:
            weight = torch.exp2(power.clamp_(min=FLOOR), out=weights[: len(block)])
            torch.sum(weight, -1, out=sums)
            torch.sum(weight.mul_(power), -1, out=moments[span])
        if overwrite and power is not block:
            block.copy_(power)
    return Sums(
        peak=peak,
        total=total,
        target=target if floor is None else target.masked_fill(targets.owned & (target < floor), -math.inf),
        moment=moments if moment else None,
        best=winners + start if best else None,
        larger=None if sought is None else larger,
    )


def target_logits(logits: torch.Tensor, targets: TargetColumns) -> torch.Tensor:
    """The logit of each target that is among these columns, in the statistics dtype; else 0."""
    dtype = statistics_dtype(logits.dtype)
    if logits.shape[-1] == 0:
        return torch.zeros_like(targets.column, dtype=dtype)
    found = logits.gather(-1, targets.column.view(*logits.shape[:-1], 1)).flatten()
    return found.to(dtype).where(targets.owned, 0)


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
    return Sums(
        peak=peak,
        total=(totals * weights).sum(0),
        target=parts.target.to(wide).sum(0),
        moment=moment,
        best=best,
        larger=None if parts.larger is None else parts.larger.sum(0),
    )


def merge_all(parts: Sequence[Sums], scale: Scale) -> Sums:
    """``merge`` for separate sums."""
    return merge(parts[0].unstack(torch.stack([part.stack() for part in parts])), scale)


def write_weights(logits: torch.Tensor, peak: torch.Tensor, scale: Scale) -> None:
    """Replace logits ``[tokens, width]`` in the statistics dtype by their weights ``2**y``."""
    powers(logits, peak, scale, out=logits).exp2_()


class LogitGradient(NamedTuple):
    """``d x_j = 2**y_j * (power + moment * y_j) + [j is the target] * target``, coefficients ``[tokens]``.

    ``peak`` is None where the logits have been overwritten by ``2**y``.  ``target`` is ``[tokens, k]`` where the
    target columns are, for ``k`` targets a token.  ``ignored`` tokens get zero whatever their logits, and so do
    logits below ``floor``.
    """

    peak: torch.Tensor | None
    power: torch.Tensor
    moment: torch.Tensor | None
    target: torch.Tensor
    ignored: torch.Tensor
    floor: torch.Tensor | None = None

    def rows(self, span: slice) -> LogitGradient:
        """Those of some of the tokens."""
        return LogitGradient(*(None if value is None else value[span] for value in self))  # type: ignore[arg-type]

    def of_weights(self, lag: torch.Tensor) -> LogitGradient:
        """The same for logits that have been overwritten by weights, their powers raised by ``-lag``."""
        return self._replace(peak=None, power=(self.power * lag.exp2()).to(self.power.dtype), floor=None)


def write_gradient(
    logits: torch.Tensor, targets: TargetColumns, gradient: LogitGradient, scale: Scale, out: torch.Tensor
) -> None:
    """Write the gradient of logits ``[..., width]`` to ``out``, which may be the logits themselves."""
    width, tokens = logits.shape[-1], gradient.power.shape[0]
    if width == 0:
        return
    dtype, peak = statistics_dtype(logits.dtype), gradient.peak
    coefficient, moment = gradient.power[:, None], None if gradient.moment is None else gradient.moment[:, None]
    rows = min(tokens, rows_that_fit(width, logits.device, share=1 if moment is None else PAIR_BACKWARD))
    workspace = None if out.dtype is dtype else logits.new_empty(rows, width, dtype=dtype)
    weights = None if moment is None else logits.new_empty(rows, width, dtype=dtype)
    columns = targets.column.reshape(tokens, -1)
    at_targets = gradient.target.where(targets.owned, 0).reshape(columns.shape)
    for span, (block, sink) in row_blocks(rows, logits, out):
        power = sink if workspace is None else workspace[: len(block)]
        values = block if block.dtype is dtype else power.copy_(block)
        below = None if gradient.floor is None else values < gradient.floor[span, None]
        if peak is not None:
            powers(values, peak[span], scale.rows(span), out=power)
        if below is not None:
            power.masked_fill_(below, -math.inf)
        if peak is None:
            torch.mul(values, coefficient[span], out=power)
        elif weights is None or moment is None:
            power.exp2_().mul_(coefficient[span])
        else:
            weight = torch.exp2(power.clamp_(min=FLOOR), out=weights[: len(block)])
            power.mul_(moment[span]).add_(coefficient[span]).mul_(weight)
        power.scatter_add_(1, columns[span], at_targets[span])
        if power is not sink:
            sink.copy_(power)
    zero_tokens_(out, gradient.ignored.view(out.shape[:-1]))


def zero_tokens_(values: torch.Tensor, mask: torch.Tensor) -> None:
    """Zero ``values`` ``[..., width]`` of the tokens that ``mask`` ``[...]`` names, whatever they are."""
    if values.device.type == "cpu":  # finding the tokens is cheap where it needs no synchronisation
        values[mask.nonzero(as_tuple=True)] = 0
    else:
        values.masked_fill_(mask.unsqueeze(-1), 0)
