"""Metrics of two policies on sampled tokens: sums in one pass, added over micro-batches, reduced in one collective."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl_logprobs.divergence import divergence_of
from rl_logprobs.errors import DtypeError, ShapeError
from rl_logprobs.policy.corrections import masked_log_ratio
from rl_logprobs.policy.losses import MAX_LOG_RATIO, PolicyLoss
from rl_logprobs.softmax.vocab_parallel import all_gather
from rl_logprobs.tensors import require_same_device, wide_dtype


@dataclass(frozen=True, eq=False)
class RatioMetrics:
    """Sums over the scored tokens of some micro-batches; add them, and take the ``values`` once per batch."""

    sums: torch.Tensor  # ``[quantities]``, in the order in which ``values`` reads them
    extremes: torch.Tensor  # ``[2]``, the largest ratio and the negative of the least

    def __add__(self, other: RatioMetrics) -> RatioMetrics:
        """Return the metrics of both parts."""
        if not isinstance(other, RatioMetrics):
            return NotImplemented
        return RatioMetrics(self.sums + other.sums, torch.maximum(self.extremes, other.extremes))

    @torch.no_grad()
    def values(self, group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
        """Return the metrics over all ranks of a group, in one all-gather of a few numbers.

        Returns:
            0-d tensors, NaN without a scored token: ``tokens``; ``ratio_mean``, ``ratio_min`` and ``ratio_max``;
            ``kl_k1`` and ``kl_k3``, estimates of ``KL(other || policy)`` in nats; ``chi2``, the mean squared ratio
            minus 1, an estimate of the chi-square divergence; ``ess``, the effective sample size as a share of the
            tokens, ``(sum w)**2 / (n sum w**2)`` (Kish), of the weights or else the ratios; ``weight_mean``; and the
            shares of tokens ``weight_zero``, ``clipped_low``, ``clipped_high`` and ``dual_clipped``.
        """
        ranks = all_gather(torch.cat([self.sums, self.extremes])[:, None], group)[..., 0]
        tokens, *totals = ranks[:, : len(self.sums)].sum(0).unbind()
        largest, least = ranks[:, len(self.sums) :].amax(0).unbind()
        log_ratio, ratio, ratio_squared, k3, weight, weight_squared, zero, low, high, dual = (
            total / tokens for total in totals
        )
        return {
            "tokens": tokens,
            "ratio_mean": ratio,
            "ratio_min": -least,
            "ratio_max": largest,
            "kl_k1": -log_ratio,
            "kl_k3": k3,
            "chi2": ratio_squared - 1,
            "ess": weight.square() / weight_squared,
            "weight_mean": weight,
            "weight_zero": zero,
            "clipped_low": low,
            "clipped_high": high,
            "dual_clipped": dual,
        }


@torch.no_grad()
def ratio_metrics(
    logprobs: torch.Tensor,
    other_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    loss: PolicyLoss | None = None,
) -> RatioMetrics:
    """Return the sums for metrics of one policy against another, without waiting for an accelerator.

    For the drift between trainer and generator pass the generator's log-probabilities as the other's; for the policy's
    step pass the old policy's.  For metrics of sequences, pass their summed log-probabilities.

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, any shape.
        other_logprobs: log-probabilities under the policy that sampled, of the same shape.
        mask: of the same shape, nonzero at scored tokens.
        weights: importance weights of the same shape, for the effective sample size; by default the ratios.
        loss: a policy loss of the same tokens, for its clip fractions.

    Returns:
        Sums of this micro-batch.  Ratios are bounded by ``exp(+-20)``.

    Raises:
        LogprobsError: shapes or devices differ, or a dtype is not as stated.

    Example:
        >>> import torch
        >>> from rl_logprobs import ratio_metrics
        >>> micro_batch = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]), torch.ones(2)
        >>> metrics = ratio_metrics(*micro_batch) + ratio_metrics(*micro_batch)
        >>> {name: round(value.item(), 3) for name, value in metrics.values().items() if name in ("ess", "kl_k3")}
        {'kl_k3': 0.074, 'ess': 0.943}
    """
    log_ratio, scored = masked_log_ratio(mask, logprobs=logprobs, other_logprobs=other_logprobs)
    if weights is not None:
        _check_weights(weights, scored)
    if loss is not None:
        if loss.clipped_low.shape != scored.shape:
            raise ShapeError(f"loss has shape {tuple(loss.clipped_low.shape)} and the mask {tuple(scored.shape)}")
        require_same_device(mask=scored, loss=loss.clipped_low)
    scored = scored.reshape(-1)
    log_ratio = log_ratio.reshape(-1).to(wide_dtype(log_ratio.device))
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = bounded.exp()
    chosen = ratio if weights is None else weights.reshape(-1).to(ratio.dtype)
    never = torch.zeros_like(scored)
    clips = (never, never, never) if loss is None else (loss.clipped_low, loss.clipped_high, loss.dual_clipped)
    quantities = torch.stack(
        [
            torch.ones_like(ratio),
            log_ratio,
            ratio,
            ratio.square(),
            divergence_of(bounded, "k3"),
            chosen,
            chosen.square(),
            (chosen == 0).to(ratio.dtype),
            *(clip.reshape(-1).to(ratio.dtype) for clip in clips),
        ]
    )
    sums = quantities.where(scored, 0).sum(1)
    signed = torch.stack([ratio, -ratio]).masked_fill(~scored, -math.inf)
    lowest = signed.new_full((2, 1), -math.inf)  # there may be no tokens
    return RatioMetrics(sums, torch.cat([signed, lowest], dim=1).amax(1))


def _check_weights(weights: torch.Tensor, scored: torch.Tensor) -> None:
    if weights.is_complex():
        raise DtypeError(f"weights must be real numbers, got {weights.dtype}")
    if weights.shape != scored.shape:
        raise ShapeError(f"weights have shape {tuple(weights.shape)} and the mask {tuple(scored.shape)}")
    require_same_device(mask=scored, weights=weights)
