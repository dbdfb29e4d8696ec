"""The contribution of some vocabulary columns to a softmax, the combination of contributions, and what to compute.

Sums are relative to the largest logit of the columns that they cover, and rescaled when they are combined ("online
softmax": Milakov and Gimelshein, arXiv:1805.02867).  They are combined in float64, which costs little at a few numbers
per token and keeps the difference of two large logarithms exact.

Notation: see ``log2_scale``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rl_logprobs.softmax.log2_scale import TemperatureScale, rescale_exponent
from rl_logprobs.tensors import wide_dtype


@dataclass(frozen=True)
class SoftmaxOptions:
    """The statistics to compute besides log-probabilities and log-sum-exp, and the way to compute them."""

    temperature: float | torch.Tensor = 1.0  # a number, or one number per token (flat)
    entropy: bool = False  # compute the entropy
    argmax: bool = False  # compute the most probable id
    target_rank: bool = False  # count the logits greater than the target's
    min_logit: torch.Tensor | None = None  # ``[tokens]``; lower logits have probability 0
    inplace_backward: bool = False  # write the gradient over the logits
    inplace_forward: bool = False  # overwrite the logits by their weights in the forward pass; not with ``entropy``


#: Log-probabilities and log-sum-exp alone.
NO_OPTIONS = SoftmaxOptions()


class TargetColumns(NamedTuple):
    """The position of each token's target among some columns, ``[tokens]`` or ``[tokens, k]``."""

    column: torch.Tensor  # the position, int64; 0 where ``owned`` is false
    owned: torch.Tensor  # bool, true where the target is among the columns and not ignored

    @classmethod
    def locate(cls, targets: torch.Tensor, ignored: torch.Tensor, start: int, width: int) -> TargetColumns:
        """Return the positions of the targets among the vocabulary ids ``[start, start + width)``."""
        column = targets - start
        owned = (column >= 0) & (column < width) & ~ignored
        return cls(column.where(owned, 0), owned)

    def slice_tokens(self, span: slice) -> TargetColumns:
        """Return the positions for the tokens in ``span``."""
        return TargetColumns(self.column[span], self.owned[span])


class PartialSoftmax(NamedTuple):
    """The contribution of some columns to each token's softmax, ``[..., tokens]``."""

    max_logit: torch.Tensor  # the largest logit (``m`` in the online-softmax papers)
    sum_exp2: torch.Tensor  # the sum of ``2**y`` (``l`` or ``d`` in those papers)
    target_logit: torch.Tensor  # the target's logit if it is among the columns, else 0
    weighted_sum: torch.Tensor | None = None  # the sum of ``2**y * y``, from which the entropy follows
    argmax: torch.Tensor | None = None  # the lowest vocabulary id with the largest logit
    num_greater: torch.Tensor | None = None  # the number of logits greater than a given one

    def stack(self) -> torch.Tensor:
        """Return the fields that are not None as ``[fields, tokens]``, in the dtype of ``max_logit``."""
        # Exact for ids and counts below 2**24.
        return torch.stack([value.to(self.max_logit.dtype) for value in self if value is not None])

    def to(self, dtype: torch.dtype) -> PartialSoftmax:
        """Return the same values in another dtype."""
        return self.unstack(self.stack().to(dtype))

    def logprobs(self, logits: torch.Tensor, scale: TemperatureScale) -> torch.Tensor:
        """Return the log-probabilities of logits ``[..., tokens]`` under the softmax over these columns, in nats."""
        exponents = (logits - self.max_logit) * scale.log2_factor
        return (exponents - self.sum_exp2.log2()) * scale.ln_factor

    def unstack(self, stacked: torch.Tensor) -> PartialSoftmax:
        """Invert ``stack`` for ``[..., fields, tokens]`` with the fields of this value."""
        values = iter(stacked.unbind(-2))
        return PartialSoftmax(*(None if field is None else next(values) for field in self))  # type: ignore[arg-type]


class LogitGradient(NamedTuple):
    """The gradient ``d x_j = 2**y_j * (weight + weighted * y_j) + [j is the target] * target``."""

    # ``[tokens]``, the reference of ``y``; None where the logits have been overwritten by ``2**y``
    max_logit: torch.Tensor | None
    weight: torch.Tensor  # ``[tokens]`` coefficient of ``2**y``
    weighted: torch.Tensor | None  # ``[tokens]`` coefficient of ``2**y * y``, or None for 0
    target: torch.Tensor  # ``[tokens]``, or ``[tokens, k]`` for ``k`` targets per token
    ignored: torch.Tensor  # ``[tokens]`` bool; their gradient is 0 whatever their logits
    min_logit: torch.Tensor | None = None  # ``[tokens]``; logits below it have gradient 0

    def slice_tokens(self, span: slice) -> LogitGradient:
        """Return the coefficients of the tokens in ``span``."""
        return LogitGradient(*(None if value is None else value[span] for value in self))  # type: ignore[arg-type]

    def for_weights(self, exponent: torch.Tensor) -> LogitGradient:
        """Return the gradient for logits overwritten by weights, with ``2**exponent`` as the factor on them."""
        weight = (self.weight * exponent.exp2()).to(self.weight.dtype)
        return self._replace(max_logit=None, weight=weight, min_logit=None)


def merge(parts: PartialSoftmax, scale: TemperatureScale) -> PartialSoftmax:
    """Combine contributions of disjoint columns, ``[parts, tokens]`` per field, in the widest dtype of the device."""
    wide = wide_dtype(parts.max_logit.device)
    maxima, sums = parts.max_logit.to(wide), parts.sum_exp2.to(wide)
    max_logit = maxima.amax(0)
    exponent = rescale_exponent(maxima, max_logit, scale)
    factors = exponent.exp2()
    weighted_sum = argmax = None
    if parts.weighted_sum is not None:
        weighted_sum = ((parts.weighted_sum.to(wide) + sums * exponent) * factors).sum(0)
    if parts.argmax is not None:
        argmax = parts.argmax.where((maxima == max_logit) | maxima.isnan(), math.inf).amin(0)
    return PartialSoftmax(
        max_logit=max_logit,
        sum_exp2=(sums * factors).sum(0),
        target_logit=parts.target_logit.to(wide).sum(0),
        weighted_sum=weighted_sum,
        argmax=argmax,
        num_greater=None if parts.num_greater is None else parts.num_greater.sum(0),
    )
