"""Clipped policy-gradient objectives per token, as losses to be minimised and averaged by ``global_mean``."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from rl_logprobs.errors import DtypeError, OptionError, ShapeError
from rl_logprobs.policy.sequences import Sequences, check_mask
from rl_logprobs.tensors import require_same_device

#: The largest absolute log-ratio that is exponentiated; beyond it the loss has no gradient.  verl uses the same bound.
MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """A policy objective of each token; fields have the log-probabilities' shape, and are 0 or false where masked."""

    loss: torch.Tensor  # the loss, differentiable
    # probability under the policy over the probability under the old policy; for GSPO of the sequence
    ratio: torch.Tensor
    clipped_low: torch.Tensor  # bool, the ratio is below its range, and the token has no gradient for it
    clipped_high: torch.Tensor  # bool, the ratio is above its range, and the token has no gradient for it
    dual_clipped: torch.Tensor  # bool, the loss of a negative advantage is at its bound


def ppo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return PPO's clipped loss of each token: ``-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)``.

    PPO (arXiv:1707.06347, equation 7) and GRPO (arXiv:2402.03300) with equal bounds; DAPO's clip-higher with
    ``clip_high=0.28`` (arXiv:2503.14476, section 3.1).  With ``dual_clip=c`` the loss of a negative advantage is at
    most ``c * |A|`` (dual-clip PPO, arXiv:1912.09729, equation 5).

    Args:
        logprobs: log-probabilities under the policy, differentiable, any shape.
        old_logprobs: log-probabilities under the ratio's old policy, of the same shape.
        advantages: a tensor that broadcasts to that shape.
        mask: of the same shape, nonzero at scored tokens; others have value 0 and gradient 0, whatever their inputs.
        clip_low: the ratio's range starts at ``1 - clip_low``.
        clip_high: the ratio's range ends at ``1 + clip_high``.
        dual_clip: bound of the ratio for negative advantages, greater than 1; None for no bound.

    Raises:
        ShapeError: the shapes differ.
        DtypeError: the log-probabilities are not floating point.
        OptionError: a bound is outside its range, or the devices differ.

    Example:
        >>> import torch
        >>> from rl_logprobs import ppo_loss
        >>> policy = ppo_loss(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.5]), torch.ones(2), torch.ones(2))
        >>> policy.loss, policy.clipped_high
        (tensor([-1.2000, -0.6065]), tensor([ True, False]))
    """
    _check_bounds(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise OptionError(f"dual_clip must be greater than 1, got {dual_clip}")
    scored, advantages = _prepared(logprobs, old_logprobs, advantages, mask)
    log_ratio = (logprobs - old_logprobs).where(scored, 0)
    return _clipped(_bounded_exp(log_ratio), advantages, scored, clip_low, clip_high, dual_clip)


def gspo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    segments: torch.Tensor | None = None,
    num_segments: int | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> PolicyLoss:
    """Return GSPO's loss of each token: its ratio is the geometric mean of its sequence's ratios.

    GSPO (arXiv:2507.18071, equations 5 to 7) in its token form (equation 14).  The gradient is the same if all tokens
    of a sequence have one advantage.  Average it by sequence: ``mean_weights(..., per="sequence")``.

    Args:
        logprobs: log-probabilities under the policy ``[..., tokens]``, differentiable.
        old_logprobs: as for ``ppo_loss``.
        advantages: as for ``ppo_loss``.
        mask: as for ``ppo_loss``.
        clip_low: the ratio's range starts at ``1 - clip_low``.
        clip_high: the ratio's range ends at ``1 + clip_high``.
        segments: the sequence of each token, where rows are packed; by default each row is a sequence.
        num_segments: the number of sequences, with ``segments``.
        cp_group: the ranks that hold other tokens of the same sequences.

    Raises:
        LogprobsError: as ``ppo_loss``; or segments are no integers, out of range, or without ``num_segments``.

    Example:
        >>> import torch
        >>> from rl_logprobs import gspo_loss
        >>> old, new = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.5, -2.5]])
        >>> gspo_loss(new, old, torch.ones(1, 1), torch.ones(1, 2)).ratio
        tensor([[1., 1.]])
    """
    _check_bounds(clip_low, clip_high)
    scored, advantages = _prepared(logprobs, old_logprobs, advantages, mask)
    sequences = Sequences(segments, num_segments, cp_group).check(scored)
    policy = logprobs.where(scored, 0)
    log_ratio = (policy - old_logprobs.where(scored, 0)).detach()
    sums, tokens = sequences.totals(torch.stack([log_ratio, scored.to(log_ratio.dtype)]))
    mean = sequences.spread(sums / tokens.clamp(min=1), policy).to(policy.dtype)
    ratio = _bounded_exp(mean + policy - policy.detach())
    return _clipped(ratio, advantages, scored, clip_low, clip_high, None)


def cispo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_high: float,
    clip_low: float | None = None,
) -> PolicyLoss:
    """Return CISPO's loss of each token: ``-stop_gradient(clip(ratio)) * A * logprobs``.

    Clips the importance weight instead of the objective, so that every token keeps a gradient (MiniMax-M1,
    arXiv:2506.13585, equations 4 and 5).

    Args:
        logprobs: log-probabilities under the policy, differentiable, any shape.
        old_logprobs: log-probabilities under the ratio's old policy, of the same shape.
        advantages: a tensor that broadcasts to that shape.
        mask: of the same shape, nonzero at scored tokens; others have value 0 and gradient 0, whatever their inputs.
        clip_high: the weight is at most ``1 + clip_high``.
        clip_low: the weight is at least ``1 - clip_low``; None for no such bound, as in the paper's experiments.

    Returns:
        The losses; ``clipped_low`` and ``clipped_high`` say where the weight is bounded.

    Raises:
        LogprobsError: as ``ppo_loss``.

    Example:
        >>> import torch
        >>> from rl_logprobs import cispo_loss
        >>> new, old = torch.tensor([0.0, -1.0], requires_grad=True), torch.tensor([-9.0, -1.0])
        >>> cispo_loss(new, old, torch.ones(2), torch.ones(2), clip_high=1.0).loss.sum().backward()
        >>> new.grad
        tensor([-2., -1.])
    """
    low = 1.0 if clip_low is None else clip_low
    _check_bounds(low, clip_high)
    scored, advantages = _prepared(logprobs, old_logprobs, advantages, mask)
    policy = logprobs.where(scored, 0)
    ratio = _bounded_exp((policy - old_logprobs.where(scored, 0)).detach())
    weight = ratio.clamp(1 - low, 1.0 + clip_high)
    never = torch.zeros_like(scored)
    return PolicyLoss(
        loss=(-weight * advantages * policy).where(scored, 0),
        ratio=ratio.where(scored, 0),
        clipped_low=scored & (ratio < 1 - low),
        clipped_high=scored & (ratio > 1.0 + clip_high),
        dual_clipped=never,
    )


def _clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    scored: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1.0 + clip_high))
    dual_clipped = torch.zeros_like(scored)
    if dual_clip is not None:
        bound = -advantages * float(dual_clip)
        dual_clipped = scored & (advantages < 0) & (loss > bound)
        loss = torch.where(dual_clipped, bound, loss)
    plain = ratio.detach()
    return PolicyLoss(
        loss=loss.where(scored, 0),
        ratio=plain.where(scored, 0),
        clipped_low=scored & (advantages < 0) & (plain < 1 - clip_low),
        clipped_high=scored & (advantages > 0) & (plain > 1.0 + clip_high),
        dual_clipped=dual_clipped,
    )


def _bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _prepared(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask as bool and the advantages of all tokens, 0 where masked."""
    scored = check_mask(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    if advantages.is_complex():
        raise DtypeError(f"advantages must be real numbers, got {advantages.dtype}")
    require_same_device(logprobs=logprobs, advantages=advantages)
    try:
        expanded = advantages.expand_as(logprobs)
    except RuntimeError as error:
        raise ShapeError(
            f"advantages {tuple(advantages.shape)} do not broadcast to logprobs {tuple(logprobs.shape)}; for one per "
            f"sequence pass advantages.unsqueeze(-1)"
        ) from error
    return scored, expanded.detach().to(logprobs.dtype).where(scored, 0)


def _check_bounds(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low <= 1:
        raise OptionError(f"clip_low must be in [0, 1], got {clip_low}: the range starts at 1 - clip_low")
    if not (clip_high >= 0 and not math.isnan(clip_high)):
        raise OptionError(f"clip_high must be 0 or more, got {clip_high}: the range ends at 1 + clip_high")
