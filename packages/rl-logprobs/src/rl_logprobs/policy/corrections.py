"""Corrections for a generator's probabilities that differ from the trainer's: importance weights and rejection.

The ratio is the trainer's probability of a token over the generator's.  Methods and their names in the literature:

* ``importance_weights(high=2)``: truncated importance sampling, TIS (Yao et al., "Your Efficient RL Framework Secretly
  Brings You Off-Policy RL Training", 2025).
* ``importance_weights(level="sequence", high=2)``: sequence-level TIS, and with ``mode="mask"`` masked importance
  sampling, MIS (Liu, Li et al., "When Speed Kills Stability", 2025).
* ``importance_weights(mode="mask", low=0.5, high=5)``: IcePop (Ling Team, arXiv:2510.18855).
* ``rejection_mask(level="mean", low=0.99, high=1.01)``: rejection by the geometric mean of a sequence's ratios.
* ``rejection_mask(level="max", statistic="k3", high=0.1)``: rejection by the largest k3 divergence of a sequence.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.distributed as dist

from rl_logprobs.divergence import divergence_of
from rl_logprobs.errors import OptionError
from rl_logprobs.policy.losses import MAX_LOG_RATIO
from rl_logprobs.policy.sequences import Sequences, check_mask

Level = Literal["token", "sequence", "mean"]
RejectionLevel = Literal["token", "sequence", "mean", "max"]
Statistic = Literal["ratio", "k2", "k3"]


@torch.no_grad()
def importance_weights(
    logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Level = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    low: float | None = None,
    high: float | None = None,
    segments: torch.Tensor | None = None,
    num_segments: int | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the weight that corrects each token's loss for the generator's probabilities.

    Args:
        logprobs: the trainer's log-probabilities of the sampled tokens ``[..., tokens]`` (before the update: ``old``).
        generator_logprobs: the generator's, of the same shape.
        mask: of the same shape, nonzero at scored tokens; others have weight 0, whatever their inputs.
        level: the ratio of a ``"token"``, of its ``"sequence"`` (the product of the tokens'), or the geometric
            ``"mean"`` of the sequence's.
        mode: ``"truncate"`` bounds the ratio; ``"mask"`` gives weight 0 to ratios outside the bounds.
        low: the lower bound; None for none.
        high: the upper bound; None for none.
        segments: the sequence of each token, where rows are packed; by default each row is a sequence.
        num_segments: the number of sequences, with ``segments``.
        cp_group: the ranks that hold other tokens of the same sequences.

    Returns:
        Weights of the same shape, without a gradient.

    Raises:
        ShapeError: the shapes differ, or a segment is out of range.
        DtypeError: the log-probabilities are not floating point, or segments are not integers.
        OptionError: an option is unknown, the bounds are not positive and ascending, only one of ``segments`` and
            ``num_segments`` is given, or the devices differ.

    Example:
        >>> import torch
        >>> from rl_logprobs import importance_weights
        >>> trainer, generator = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-3.0, -1.5]])
        >>> importance_weights(trainer, generator, torch.ones(1, 2), high=2.0)
        tensor([[2.0000, 1.6487]])
        >>> importance_weights(trainer, generator, torch.ones(1, 2), mode="mask", low=0.5, high=5.0)
        tensor([[0.0000, 1.6487]])
    """
    if level not in get_args(Level):
        raise OptionError(f"level must be one of {', '.join(get_args(Level))}, got {level!r}")
    if mode not in ("truncate", "mask"):
        raise OptionError(f"mode must be 'truncate' or 'mask', got {mode!r}")
    bounds = _bounds(low, high)
    log_ratio, scored = masked_log_ratio(mask, logprobs=logprobs, generator_logprobs=generator_logprobs)
    sequences = Sequences(segments, num_segments, cp_group)
    ratio = _at_level(log_ratio, scored, level, sequences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode == "truncate":
        weights = ratio if low is None and high is None else ratio.clamp(*bounds)
    else:
        weights = ratio.where(_within(ratio, *bounds), 0)
    return weights.where(scored, 0)


@torch.no_grad()
def rejection_mask(
    logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: RejectionLevel = "token",
    statistic: Statistic = "ratio",
    low: float | None = None,
    high: float | None = None,
    segments: torch.Tensor | None = None,
    num_segments: int | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the mask without the tokens, or sequences, on which trainer and generator differ too much.

    Args:
        logprobs: the trainer's log-probabilities of the sampled tokens ``[..., tokens]``.
        generator_logprobs: the generator's, of the same shape.
        mask: of the same shape, nonzero at scored tokens.
        level: the statistic of a ``"token"``; its sum over the ``"sequence"`` (for a ratio the product); its ``"mean"``
            (for a ratio the geometric mean); or its ``"max"``.
        statistic: the ``"ratio"``, or a divergence of the generator from the trainer: ``"k2"`` (half the squared
            log-ratio) or ``"k3"`` (``ratio - 1 - log(ratio)``), see ``kl_estimate``.
        low: the lower bound of a ratio; None for none.
        high: the upper bound; None for none.
        segments: the sequence of each token, where rows are packed; by default each row is a sequence.
        num_segments: the number of sequences, with ``segments``.
        cp_group: the ranks that hold other tokens of the same sequences.

    Returns:
        bool of the same shape, true at scored tokens with a statistic within the bounds.

    Raises:
        LogprobsError: as ``importance_weights``.

    Example:
        >>> import torch
        >>> from rl_logprobs import rejection_mask
        >>> trainer = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
        >>> generator = torch.tensor([[-1.2, -0.9], [-9.0, -1.0]])
        >>> rejection_mask(trainer, generator, torch.ones(2, 2), level="mean", low=0.5, high=2.0)
        tensor([[ True,  True],
                [False, False]])
    """
    if level not in get_args(RejectionLevel):
        raise OptionError(f"level must be one of {', '.join(get_args(RejectionLevel))}, got {level!r}")
    if statistic not in get_args(Statistic):
        raise OptionError(f"statistic must be one of {', '.join(get_args(Statistic))}, got {statistic!r}")
    bounds = _bounds(low, high)
    log_ratio, scored = masked_log_ratio(mask, logprobs=logprobs, generator_logprobs=generator_logprobs)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    per_token = log_ratio if statistic == "ratio" else divergence_of(bounded, statistic)
    value = _at_level(per_token, scored, level, Sequences(segments, num_segments, cp_group))
    if statistic == "ratio":
        value = value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return scored & _within(value, *bounds)


def masked_log_ratio(mask: torch.Tensor, **logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the difference of two log-probabilities, given by name, 0 where masked, and the mask as bool."""
    scored = check_mask(mask, **logprobs)
    policy, other = logprobs.values()
    return (policy - other).where(scored, 0), scored


def _at_level(
    per_token: torch.Tensor, scored: torch.Tensor, level: RejectionLevel, sequences: Sequences
) -> torch.Tensor:
    if level == "token":
        return per_token
    sequences = sequences.check(scored)
    if level == "max":
        return sequences.spread(sequences.maxima(per_token.masked_fill(~scored, -math.inf)), per_token)
    sums, tokens = sequences.totals(torch.stack([per_token, scored.to(per_token.dtype)]))
    value = sums if level == "sequence" else sums / tokens.clamp(min=1)
    return sequences.spread(value, per_token).to(per_token.dtype)


def _within(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (value >= low) & (value <= high)


def _bounds(low: float | None, high: float | None) -> tuple[float, float]:
    if low is not None and not low >= 0:
        raise OptionError(f"low must be 0 or more, got {low}")
    if high is not None and not (high > 0 and high >= (low or 0)):
        raise OptionError(f"high must be positive and at least low ({low}), got {high}")
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)
