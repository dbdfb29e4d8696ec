"""Divergence from a reference policy: over the whole vocabulary, or estimated from the sampled tokens."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_logprobs._torch_compat import apply_function
from rl_logprobs.errors import OptionError, PlacementError, ShapeError
from rl_logprobs.layout import LocalLogits, VocabShard, locate_logits
from rl_logprobs.logprobs import checked_temperature
from rl_logprobs.powers import Scale, peak_lag, powers
from rl_logprobs.rows import row_blocks, rows_that_fit, statistics_dtype, wide_dtype
from rl_logprobs.softmax import Sums, merge, zero_tokens_
from rl_logprobs.targets import local_targets
from rl_logprobs.vocab_parallel import all_gather

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: KlEstimator = "k3"
) -> torch.Tensor:
    """Estimate ``KL(policy || reference)`` from tokens that the policy sampled.

    With ``r = reference_logprobs - logprobs`` (Schulman, "Approximating KL Divergence", 2020): ``k1 = -r`` is
    unbiased and may be negative, ``k2 = r**2 / 2`` is biased with low variance, ``k3 = exp(r) - 1 - r`` is
    unbiased and never negative (the one in GRPO, arXiv:2402.03300, equation 4).

    Args:
        logprobs: log-probabilities under the policy, any shape.
        reference_logprobs: those of the same tokens under the reference.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.

    Returns:
        One estimate a token, differentiable in both.

    Raises:
        ShapeError: the shapes differ.
        OptionError: another estimator.
    """
    if logprobs.shape != reference_logprobs.shape:
        raise ShapeError(
            f"logprobs {tuple(logprobs.shape)} and reference_logprobs {tuple(reference_logprobs.shape)} differ"
        )
    ratio = reference_logprobs - logprobs
    if estimator == "k1":
        return -ratio
    if estimator == "k2":
        return ratio.square() / 2
    if estimator == "k3":
        return ratio.expm1() - ratio
    raise OptionError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")


def token_kl(
    logits: torch.Tensor,
    reference_logits: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    temperature: float | torch.Tensor = 1.0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``KL(softmax(logits / T) || softmax(reference_logits / T))`` of each token, over the whole vocabulary.

    One pass over both and one collective forward, none backward.  A token that the policy rules out counts
    nothing; one that only the reference rules out makes the divergence infinite.

    Args:
        logits: as for ``token_logprobs``.
        reference_logits: of the same shape and layout, any floating dtype.
        group: as for ``token_logprobs``.
        vocab_size: as for ``token_logprobs``.
        vocab_start: as for ``token_logprobs``.
        temperature: as for ``token_logprobs``.
        mask: bool or integers of the logits' leading shape, the full batch or this rank's part, zero at tokens that
            do not count (such as prompt and padding): value 0 and gradient 0, whatever their logits.

    Returns:
        Nats, of the logits' leading shape, float32 (float64 if either is), differentiable in both.

    Raises:
        ShapeError, PlacementError, DtypeError, OptionError: input that cannot be compared, found before any
            collective starts.
    """
    policy = locate_logits(logits, group=group, vocab_size=vocab_size, vocab_start=vocab_start)
    reference = locate_logits(reference_logits, group=group, vocab_size=vocab_size, vocab_start=vocab_start)
    _check_alike(policy, reference)
    shape = policy.values.shape[:-1]
    counted = policy.values.new_ones(shape, dtype=torch.uint8)
    if mask is not None:
        counted = local_targets((mask != 0).to(torch.uint8), policy.tokens, name="mask").to(counted.device)
    flat = checked_temperature(temperature, counted)
    ignored = None if mask is None else counted.reshape(-1) == 0
    found: torch.Tensor = apply_function(_Divergence, policy.values, reference.values, policy.vocab, flat, ignored)
    return found.view(shape)


def _check_alike(policy: LocalLogits, reference: LocalLogits) -> None:
    if policy.values.shape != reference.values.shape or policy.tokens != reference.tokens:
        raise ShapeError(
            f"the policy's logits on this rank are {tuple(policy.values.shape)} and the reference's "
            f"{tuple(reference.values.shape)}; both must hold the same tokens and columns"
        )
    if policy.vocab != reference.vocab:
        raise PlacementError(
            f"the policy's vocabulary lies as {policy.vocab} and the reference's as {reference.vocab}; place them alike"
        )


class _Finished(NamedTuple):
    """Per token: both peaks and totals over the whole vocabulary, and the divergence in bits."""

    peak: torch.Tensor
    total: torch.Tensor
    other_peak: torch.Tensor
    other_total: torch.Tensor
    bits: torch.Tensor


class _Divergence(torch.autograd.Function):
    """With ``p`` and ``q`` the two softmaxes, ``KL = sum p (log p - log q)``.

    ``d x_j = p_j (log p_j - log q_j - KL) / T`` for the policy and ``(q_j - p_j) / T`` for the reference.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        reference: torch.Tensor,
        shard: VocabShard,
        temperature: float | torch.Tensor,
        ignored: torch.Tensor | None,
    ) -> torch.Tensor:
        dtype = statistics_dtype(torch.promote_types(logits.dtype, reference.dtype))
        scale = Scale.of(temperature, dtype)
        local = _local_sums(logits[..., : shard.width], reference[..., : shard.width], scale, dtype)
        finished = _finish(all_gather(local, shard.group), scale)
        ctx.save_for_backward(logits, reference, ignored, *finished)
        ctx.scale, ctx.width, ctx.dtype = scale, shard.width, dtype
        divergence = (finished.bits * scale.nats).to(dtype)
        return divergence if ignored is None else divergence.masked_fill_(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, reference, ignored, *saved = ctx.saved_tensors
        d_logits, d_reference = (
            torch.zeros_like(tensor, memory_format=torch.contiguous_format) if needed else None
            for tensor, needed in zip((logits, reference), ctx.needs_input_grad[:2], strict=True)
        )
        strength = gradients[0].to(saved[0].dtype) * ctx.scale.slope
        columns = slice(0, ctx.width)
        _write_gradients(
            logits[..., columns],
            reference[..., columns],
            _Finished(*saved),
            strength,
            ctx.scale,
            ctx.dtype,
            None if d_logits is None else d_logits[..., columns],
            None if d_reference is None else d_reference[..., columns],
        )
        for out in (d_logits, d_reference):
            if out is not None and ignored is not None:
                zero_tokens_(out, ignored.view(out.shape[:-1]))
        return d_logits, d_reference, None, None, None


def _local_sums(logits: torch.Tensor, reference: torch.Tensor, scale: Scale, dtype: torch.dtype) -> torch.Tensor:
    """``[5, tokens]``: peak and total of either, and the sum of ``2**y * (y - v)``, relative to both peaks."""
    sums = logits.new_zeros(5, logits.shape[:-1].numel(), dtype=dtype)
    peak, total, other_peak, other_total, cross = sums.unbind(0)
    if logits.shape[-1] == 0:
        peak.fill_(-math.inf)
        other_peak.fill_(-math.inf)
        return sums
    for span, (block, other) in row_blocks(rows_that_fit(logits.shape[-1], logits.device), logits, reference):
        mine, theirs = block.to(dtype), other.to(dtype)
        torch.amax(mine, -1, out=peak[span])
        torch.amax(theirs, -1, out=other_peak[span])
        here = scale.rows(span)
        y, v = powers(mine, peak[span], here), powers(theirs, other_peak[span], here)
        weights = y.exp2()
        torch.sum(weights, -1, out=total[span])
        torch.sum(v.exp2(), -1, out=other_total[span])
        torch.sum(_where_possible(weights, y - v), -1, out=cross[span])
    return sums


def _where_possible(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``weights * values``, and zero where the policy gives no weight, whatever the value."""
    return torch.where(weights == 0, 0, weights * values)


def _finish(gathered: torch.Tensor, scale: Scale) -> _Finished:
    peak, total, other_peak, other_total, cross = gathered.to(wide_dtype(gathered.device)).unbind(1)
    nothing = torch.zeros_like(total)
    other = merge(Sums(other_peak, other_total, nothing), scale)
    # A rank that the reference rules out has an infinite cross moment already, or no weight.
    lag = peak_lag(other_peak, other.peak, scale).masked_fill(other_peak == -math.inf, 0)
    policy = merge(Sums(peak, total, nothing, cross - total * lag), scale)
    difference = nothing[0] if policy.moment is None else policy.moment / policy.total
    bits = difference - policy.total.log2() + other.total.log2()
    return _Finished(policy.peak, policy.total, other.peak, other.total, bits)


def _write_gradients(
    logits: torch.Tensor,
    reference: torch.Tensor,
    finished: _Finished,
    strength: torch.Tensor,
    scale: Scale,
    dtype: torch.dtype,
    d_logits: torch.Tensor | None,
    d_reference: torch.Tensor | None,
) -> None:
    if logits.shape[-1] == 0:
        return
    offset = (finished.other_total / finished.total).log2() - finished.bits
    share = (strength / finished.total).to(dtype)
    other_share = (strength / finished.other_total).to(dtype)
    stretch = (strength * scale.nats / finished.total).to(dtype)
    rows = rows_that_fit(logits.shape[-1], logits.device)
    outputs = [out for out in (d_logits, d_reference) if out is not None]
    for span, (block, other, *sinks) in row_blocks(rows, logits, reference, *outputs):
        here = scale.rows(span)
        y = powers(block.to(dtype), finished.peak[span].to(dtype), here)
        v = powers(other.to(dtype), finished.other_peak[span].to(dtype), here)
        weights = y.exp2()
        if d_logits is not None:
            excess = (y - v).add_(offset[span, None].to(dtype))
            sinks[0].copy_(_where_possible(weights, excess) * stretch[span, None])
        if d_reference is not None:
            sinks[-1].copy_(v.exp2() * other_share[span, None] - weights * share[span, None])
