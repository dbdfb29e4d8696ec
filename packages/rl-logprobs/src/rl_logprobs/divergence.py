"""Divergence from a reference policy: over the full vocabulary, or estimated from the sampled tokens."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_logprobs._torch_compat import apply_function
from rl_logprobs.devices import require_same_device
from rl_logprobs.dtypes import statistics_dtype, wide_dtype
from rl_logprobs.errors import DtypeError, OptionError, PlacementError, ShapeError
from rl_logprobs.softmax.log2_scale import TemperatureScale, check_temperature, log2_weights, rescale_exponent
from rl_logprobs.softmax.partial_softmax import PartialSoftmax, merge
from rl_logprobs.softmax.row_blocks import row_blocks, rows_per_workspace
from rl_logprobs.softmax.torch_kernels import zero_tokens_
from rl_logprobs.softmax.vocab_parallel import all_gather
from rl_logprobs.softmax.vocab_shard import LocalLogits, VocabColumns, VocabShard, locate_logits
from rl_logprobs.support.entries import kept_entries
from rl_logprobs.support.kept_logits import kept_logits
from rl_logprobs.support.kept_sets import Support
from rl_logprobs.support.statistics import kept_divergence, kept_softmax
from rl_logprobs.targets import local_targets

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    estimator: KlEstimator = "k3",
    *,
    sampled_logprobs: torch.Tensor | None = None,
    gradient: Literal["estimator", "unbiased"] = "estimator",
) -> torch.Tensor:
    """Estimate ``KL(policy || reference)`` from sampled tokens.

    With ``r = reference_logprobs - logprobs`` (Schulman, "Approximating KL Divergence", 2020): ``k1 = -r`` is
    unbiased and may be negative, ``k2 = r**2 / 2`` is biased with low variance, ``k3 = exp(r) - 1 - r`` is
    unbiased and never negative (the one in GRPO, arXiv:2402.03300, equation 4).

    An unbiased *value* does not make its gradient the divergence's.  For tokens that the policy itself sampled, the
    gradient of ``k1`` is 0 on average, that of ``k3`` is the gradient of ``KL(reference || policy)``, and that of
    ``k2`` is right (Liu et al., "Rethinking KL Regularization in RLHF", arXiv:2510.01555).  Two ways to the right
    gradient:

    * ``gradient="unbiased"``: the value of the estimator with the gradient of ``k2``, for tokens sampled by the policy.
    * ``sampled_logprobs``: the estimator times the ratio of the policy and the policy that sampled, differentiated
      through both factors (DeepSeek-V3.2, arXiv:2512.02556, section 3.1); right for ``k1`` and ``k3``, also off-policy.

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, any shape, floating point.
        reference_logprobs: log-probabilities of the same tokens under the reference, of the same shape.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        sampled_logprobs: log-probabilities under the policy that sampled, of the same shape; a detached copy of
            ``logprobs`` if that is the policy itself.
        gradient: ``"estimator"`` for that of the formula, or ``"unbiased"``.

    Returns:
        One estimate per token in nats, of the shape of ``logprobs``, differentiable in both (with
        ``gradient="unbiased"`` in ``logprobs`` alone).

    Raises:
        ShapeError: the shapes differ.
        DtypeError: one of them is not floating point.
        OptionError: the estimator or the gradient is unknown, both ways to the right gradient are asked for, or the
            devices differ.

    Example:
        >>> import torch
        >>> from rl_logprobs import kl_estimate
        >>> kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]), "k3")
        tensor([0.0000, 0.7183])
    """
    for name, other in (("reference_logprobs", reference_logprobs), ("sampled_logprobs", sampled_logprobs)):
        if other is not None and other.shape != logprobs.shape:
            raise ShapeError(f"logprobs {tuple(logprobs.shape)} and {name} {tuple(other.shape)} differ")
    for name, tensor in (("logprobs", logprobs), ("reference_logprobs", reference_logprobs)):
        if not tensor.is_floating_point():
            raise DtypeError(f"{name} must be floating point, got {tensor.dtype}")
    require_same_device(logprobs=logprobs, reference_logprobs=reference_logprobs)
    ratio = reference_logprobs - logprobs
    if estimator == "k1":
        value = -ratio
    elif estimator == "k2":
        value = ratio.square() / 2
    elif estimator == "k3":
        value = ratio.expm1() - ratio
    else:
        raise OptionError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")
    if gradient not in ("estimator", "unbiased"):
        raise OptionError(f"gradient must be 'estimator' or 'unbiased', got {gradient!r}")
    if gradient == "unbiased":
        if sampled_logprobs is not None:
            raise OptionError("gradient='unbiased' is for tokens of the policy itself: leave out sampled_logprobs")
        with_gradient = (logprobs - reference_logprobs.detach()).square() / 2
        return value.detach() + with_gradient - with_gradient.detach()
    if sampled_logprobs is None:
        return value
    return (logprobs - sampled_logprobs.detach()).exp() * value


def token_kl(
    logits: torch.Tensor,
    reference_logits: torch.Tensor,
    *,
    shard: VocabShard | None = None,
    temperature: float | torch.Tensor = 1.0,
    mask: torch.Tensor | None = None,
    support: Support | None = None,
) -> torch.Tensor:
    """Return ``KL(softmax(logits / T) || softmax(reference_logits / T))`` of each token, over the full vocabulary.

    One pass over both tensors and one collective forward, none backward.  Tokens with probability 0 under the policy
    contribute nothing; a token with probability 0 under the reference alone makes the divergence infinite.

    Args:
        logits: ``[..., tokens, vocab]``, plain, a DTensor or a local shard, as ``token_statistics`` takes them.
        reference_logits: the reference's logits of the same shape and placement, any floating dtype.
        shard: which ids the columns of local logits are, or how many ids are no padding; see ``VocabShard``.
        temperature: positive number, or positive tensor that broadcasts to this rank's tokens.
        mask: bool or integers of the logits' leading shape, the full batch or this rank's part; 0 at tokens that do
            not count (such as prompt and padding): value 0 and gradient 0, whatever their logits.
        support: the divergence of the two distributions over the ids that the sampler kept, each normalised over them;
            one row per token, for the full batch or for this rank's part.

    Returns:
        Nats, of the logits' leading shape, float32 (float64 if either input is float64), differentiable in both.

    Raises:
        ShapeError: the two hold different tokens or columns, or the mask does not fit them.
        PlacementError: the vocabularies are sharded differently or over two mesh axes, or the logits are a partial sum.
        DtypeError: the logits are not floating point.
        OptionError: an option is outside its range, or ``shard`` has a group for a DTensor.
        SupportError: the kept set of a token that counts is empty, or contains an id outside the vocabulary.  All
            errors are raised before any collective starts.

    Example:
        >>> import torch
        >>> from rl_logprobs import token_kl
        >>> token_kl(torch.tensor([[0.0, 2.0, 1.0]]), torch.zeros(1, 3))
        tensor([0.2662])
    """
    policy = locate_logits(logits, shard)
    reference = locate_logits(reference_logits, shard)
    _check_same_shard(policy, reference)
    require_same_device(logits=policy.values, reference_logits=reference.values)
    shape = policy.values.shape[:-1]
    counted = policy.values.new_ones(shape, dtype=torch.uint8)
    if mask is not None:
        counted = local_targets((mask != 0).to(torch.uint8), policy.tokens, name="mask").to(counted.device)
    flat_temperature = check_temperature(temperature, counted)
    if support is not None:
        return _kept_kl(policy, reference, flat_temperature, counted == 0, support)
    ignored = None if mask is None else counted.reshape(-1) == 0
    found: torch.Tensor = apply_function(
        _Divergence, policy.values, reference.values, policy.vocab, flat_temperature, ignored
    )
    return found.view(shape)


def _kept_kl(
    policy: LocalLogits,
    reference: LocalLogits,
    temperature: float | torch.Tensor,
    ignored: torch.Tensor,
    support: Support,
) -> torch.Tensor:
    """Return the divergence over kept sets; one all-reduce of the kept logits of each side."""
    entries, flat = kept_entries(support, policy.tokens, ignored, policy.vocab.vocab_size), ignored.reshape(-1)
    softmaxes = [
        kept_softmax(kept_logits(side.values, entries, side.vocab), entries, flat, temperature)
        for side in (policy, reference)
    ]
    dtype = statistics_dtype(torch.promote_types(policy.values.dtype, reference.values.dtype))
    divergence = kept_divergence(softmaxes[0], softmaxes[1], entries)
    return divergence.masked_fill(flat, 0).to(dtype).view(ignored.shape)


def _check_same_shard(policy: LocalLogits, reference: LocalLogits) -> None:
    if policy.values.shape != reference.values.shape or policy.tokens != reference.tokens:
        raise ShapeError(
            f"the policy's logits on this rank are {tuple(policy.values.shape)} and the reference's "
            f"{tuple(reference.values.shape)}; both must hold the same tokens and columns"
        )
    if policy.vocab != reference.vocab:
        raise PlacementError(
            f"the policy holds {_described(policy.vocab)} and the reference {_described(reference.vocab)}; shard both "
            "vocabularies the same way"
        )


def _described(shard: VocabColumns) -> str:
    where = "on one rank" if shard.group is None else f"over ranks {dist.get_process_group_ranks(shard.group)}"
    return f"columns {shard.start} to {shard.start + shard.width} of {shard.vocab_size} {where}"


class _DivergenceTotals(NamedTuple):
    """Values over the full vocabulary, ``[tokens]``: maximum and sum of weights of both, and the divergence in bits."""

    max_logit: torch.Tensor
    sum_exp2: torch.Tensor
    ref_max_logit: torch.Tensor
    ref_sum_exp2: torch.Tensor
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
        shard: VocabColumns,
        temperature: float | torch.Tensor,
        ignored: torch.Tensor | None,
    ) -> torch.Tensor:
        dtype = statistics_dtype(torch.promote_types(logits.dtype, reference.dtype))
        scale = TemperatureScale.of(temperature, dtype)
        local = _local_sums(logits[..., : shard.width], reference[..., : shard.width], scale, dtype)
        totals = _combine_ranks(all_gather(local, shard.group), scale)
        ctx.save_for_backward(logits, reference, ignored, *totals)
        ctx.scale, ctx.width, ctx.dtype = scale, shard.width, dtype
        divergence = (totals.bits * scale.ln_factor).to(dtype)
        return divergence if ignored is None else divergence.masked_fill_(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, reference, ignored, *totals = ctx.saved_tensors
        d_logits, d_reference = (
            torch.zeros_like(tensor, memory_format=torch.contiguous_format) if needed else None
            for tensor, needed in zip((logits, reference), ctx.needs_input_grad[:2], strict=True)
        )
        d_divergence = gradients[0].to(totals[0].dtype) * ctx.scale.inv_temperature
        columns = slice(0, ctx.width)
        _write_gradients(
            logits[..., columns],
            reference[..., columns],
            _DivergenceTotals(*totals),
            d_divergence,
            ctx.scale,
            ctx.dtype,
            None if d_logits is None else d_logits[..., columns],
            None if d_reference is None else d_reference[..., columns],
        )
        for out in (d_logits, d_reference):
            if out is not None and ignored is not None:
                zero_tokens_(out, ignored.view(out.shape[:-1]))
        return d_logits, d_reference, None, None, None


def _local_sums(
    logits: torch.Tensor, reference: torch.Tensor, scale: TemperatureScale, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``[5, tokens]``: maximum and sum of weights of both, and the sum of ``2**y * (y - v)``.

    ``y`` and ``v`` are the exponents of policy and reference, relative to the two maxima.
    """
    sums = logits.new_zeros(5, logits.shape[:-1].numel(), dtype=dtype)
    max_logit, sum_exp2, ref_max_logit, ref_sum_exp2, cross = sums.unbind(0)
    if logits.shape[-1] == 0:
        max_logit.fill_(-math.inf)
        ref_max_logit.fill_(-math.inf)
        return sums
    rows = rows_per_workspace(logits.shape[-1], logits.device)
    for span, (block, ref_block) in row_blocks(rows, logits, reference):
        values, ref_values = block.to(dtype), ref_block.to(dtype)
        torch.amax(values, -1, out=max_logit[span])
        torch.amax(ref_values, -1, out=ref_max_logit[span])
        block_scale = scale.slice_tokens(span)
        y = log2_weights(values, max_logit[span], block_scale)
        v = log2_weights(ref_values, ref_max_logit[span], block_scale)
        weights = y.exp2()
        torch.sum(weights, -1, out=sum_exp2[span])
        torch.sum(v.exp2(), -1, out=ref_sum_exp2[span])
        torch.sum(_weighted(weights, y - v), -1, out=cross[span])
    return sums


def _weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``weights * values``, and 0 where the weight is 0, even if the value is infinite or NaN."""
    return torch.where(weights == 0, 0, weights * values)


def _combine_ranks(gathered: torch.Tensor, scale: TemperatureScale) -> _DivergenceTotals:
    max_logit, sum_exp2, ref_max_logit, ref_sum_exp2, cross = gathered.to(wide_dtype(gathered.device)).unbind(1)
    zeros = torch.zeros_like(sum_exp2)
    reference = merge(PartialSoftmax(ref_max_logit, ref_sum_exp2, zeros), scale)
    # Where all columns of a rank have probability 0 under the reference, its cross sum is infinite already, or its
    # policy weights are 0.
    rescale = rescale_exponent(ref_max_logit, reference.max_logit, scale)
    rescale = rescale.masked_fill(ref_max_logit == -math.inf, 0)
    policy = merge(PartialSoftmax(max_logit, sum_exp2, zeros, cross - sum_exp2 * rescale), scale)
    mean_difference = zeros[0] if policy.weighted_sum is None else policy.weighted_sum / policy.sum_exp2
    bits = mean_difference - policy.sum_exp2.log2() + reference.sum_exp2.log2()
    return _DivergenceTotals(policy.max_logit, policy.sum_exp2, reference.max_logit, reference.sum_exp2, bits)


def _write_gradients(
    logits: torch.Tensor,
    reference: torch.Tensor,
    totals: _DivergenceTotals,
    d_divergence: torch.Tensor,
    scale: TemperatureScale,
    dtype: torch.dtype,
    d_logits: torch.Tensor | None,
    d_reference: torch.Tensor | None,
) -> None:
    if logits.shape[-1] == 0:
        return
    offset = (totals.ref_sum_exp2 / totals.sum_exp2).log2() - totals.bits
    weight_coef = (d_divergence / totals.sum_exp2).to(dtype)
    ref_weight_coef = (d_divergence / totals.ref_sum_exp2).to(dtype)
    policy_coef = (d_divergence * scale.ln_factor / totals.sum_exp2).to(dtype)
    rows = rows_per_workspace(logits.shape[-1], logits.device)
    outputs = [out for out in (d_logits, d_reference) if out is not None]
    for span, (block, ref_block, *out_blocks) in row_blocks(rows, logits, reference, *outputs):
        block_scale = scale.slice_tokens(span)
        y = log2_weights(block.to(dtype), totals.max_logit[span].to(dtype), block_scale)
        v = log2_weights(ref_block.to(dtype), totals.ref_max_logit[span].to(dtype), block_scale)
        weights = y.exp2()
        if d_logits is not None:
            excess = (y - v).add_(offset[span, None].to(dtype))
            out_blocks[0].copy_(_weighted(weights, excess) * policy_coef[span, None])
        if d_reference is not None:
            out_blocks[-1].copy_(v.exp2() * ref_weight_coef[span, None] - weights * weight_coef[span, None])
