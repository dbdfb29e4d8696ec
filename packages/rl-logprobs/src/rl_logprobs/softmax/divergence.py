"""Divergence of two softmaxes over a vocabulary that is sharded across ranks, one small tile of each at a time.

Either side is logits or hidden states with an LM head; tiles of both cover the same tokens and columns.  A KL
divergence needs one pass and one collective forward.  The mixture of a Jensen-Shannon divergence needs both partition
sums before it can be computed, hence a second pass and a second collective.  Backward computes the tiles again.

Notation: ``p`` and ``q`` are the two softmaxes, ``y`` and ``v`` their exponents (see ``log2_scale``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from rl_logprobs._torch_compat import apply_function, first_derivative
from rl_logprobs.softmax import triton_divergence
from rl_logprobs.softmax.fused_linear import TileGradient
from rl_logprobs.softmax.log2_scale import TemperatureScale, log2_weights, rescale_exponent
from rl_logprobs.softmax.partial_softmax import PartialSoftmax, merge
from rl_logprobs.softmax.row_blocks import row_blocks, rows_per_workspace
from rl_logprobs.softmax.tile_pair import Side, TilePair
from rl_logprobs.softmax.torch_kernels import zero_tokens_
from rl_logprobs.softmax.vocab_parallel import Gradients, all_gather
from rl_logprobs.tensors import wide_dtype

#: Kinds of gradients: of ``KL(p || q)`` by ``p``, of ``KL(q || p)`` by ``p``, and of a divergence from the mixture.
OF_P, OF_Q, MIXED = range(3)


def softmax_divergence(student: Side, teacher: Side, ignored: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the generalised Jensen-Shannon divergence of each token in nats, ``[tokens]``; 0 where ``ignored``."""
    # ``KL(teacher || student)`` for ``beta=0`` and ``KL(student || teacher)`` for ``beta=1``. Between them, with ``m``
    # the mixture ``(1 - beta) * student + beta * teacher``, ``(1 - beta) * KL(student || m) + beta * KL(teacher ||
    # m)``. The ranks of the student's group call together.
    sides = replace(student, tensors=()), replace(teacher, tensors=())
    tensors = *student.tensors, *teacher.tensors
    return cast(torch.Tensor, apply_function(_Divergence, sides, len(student.tensors), ignored, beta, *tensors))


class _Totals(NamedTuple):
    """Values over the full vocabulary, ``[tokens]``: maximum and sum of weights of both, and up to two divergences."""

    p_max: torch.Tensor
    p_sum: torch.Tensor
    q_max: torch.Tensor
    q_sum: torch.Tensor
    bits: torch.Tensor  # ``KL(p || q)``, or with a mixture ``KL(p || mixture)``
    other_bits: torch.Tensor  # ``KL(q || mixture)``

    def swapped(self) -> _Totals:
        return _Totals(self.q_max, self.q_sum, self.p_max, self.p_sum, self.other_bits, self.bits)


class _Divergence(torch.autograd.Function):
    """The teacher is ``p`` for ``beta=0``, and the student otherwise."""

    @staticmethod
    def forward(
        ctx: Any,
        sides: tuple[Side, Side],
        split: int,
        ignored: torch.Tensor,
        beta: float,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        pair = _pair(sides, split, tensors, ignored, beta)
        mixture = 0 < beta < 1
        sums = _sums(pair, cross=not mixture)
        gathered = all_gather(sums.to(pair.dtype), pair.shard.group)
        totals = _totals(_combine(gathered, pair.p_scale, pair.q_scale))
        if mixture:
            bits = all_gather(_mixture_sums(pair, totals, beta), pair.shard.group).sum(0)
            totals = totals._replace(bits=bits[0], other_bits=bits[1])
        ctx.save_for_backward(ignored, *totals, *tensors)
        ctx.sides, ctx.split, ctx.beta = sides, split, beta
        nats = totals.bits * pair.p_scale.ln_factor
        if mixture:
            nats = nats * (1 - beta) + totals.other_bits * pair.q_scale.ln_factor * beta
        return nats.to(pair.dtype).masked_fill_(ignored, 0)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ignored, *saved = ctx.saved_tensors
        count = len(saved) - len(ctx.needs_input_grad[4:])
        totals, tensors = _Totals(*saved[:count]), saved[count:]
        pair = _pair(ctx.sides, ctx.split, tensors, ignored, ctx.beta)
        d_divergence = gradients[0].to(totals.p_sum.dtype).masked_fill(ignored, 0)
        needed, split = ctx.needs_input_grad[4:], ctx.split
        p_needed, q_needed = needed[:split], needed[split:]
        if ctx.beta == 0:
            p_needed, q_needed = q_needed, p_needed
        p_kind, q_kind = (MIXED, MIXED) if 0 < ctx.beta < 1 else (OF_P, OF_Q)
        sides = [
            _side_gradients(pair, p_needed, p_kind, totals, d_divergence, 1 - ctx.beta),
            _side_gradients(pair.swapped(), q_needed, q_kind, totals.swapped(), d_divergence, ctx.beta),
        ]
        if ctx.beta == 0:
            sides.reverse()
        return None, None, None, None, *sides[0], *sides[1]


def _side_gradients(
    pair: TilePair, needed: Sequence[bool], kind: int, totals: _Totals, d_divergence: torch.Tensor, share: float
) -> Gradients:
    if not any(needed):
        return (None,) * len(needed)
    numbers = _numbers(pair, kind, totals, d_divergence, share)
    if pair.on_triton:
        maxima = totals.p_max.to(pair.dtype), totals.q_max.to(pair.dtype)
        return triton_divergence.gradients(pair, needed, kind, torch.stack([*maxima, *numbers]), share)
    return pair.p.gradients(needed, _writer(pair, totals, kind, numbers, share))


def _numbers(
    pair: TilePair, kind: int, totals: _Totals, d_divergence: torch.Tensor, share: float
) -> list[torch.Tensor]:
    """Return the coefficients ``[tokens]`` of a kind of gradient, in the dtype of the pair."""
    d_logits = d_divergence * pair.p_scale.inv_temperature
    d_bits = d_logits * pair.p_scale.ln_factor
    if kind == OF_P:
        numbers = [(totals.q_sum / totals.p_sum).log2() - totals.bits, d_bits / totals.p_sum]
    elif kind == OF_Q:
        numbers = [d_logits / totals.p_sum, d_logits / totals.q_sum]
    else:
        numbers = [totals.p_sum.log2(), totals.q_sum.log2(), totals.bits, d_bits * share]
    return [number.to(pair.dtype) for number in numbers]


def _pair(
    sides: tuple[Side, Side],
    split: int,
    tensors: Sequence[torch.Tensor | None],
    ignored: torch.Tensor,
    beta: float,
) -> TilePair:
    student, teacher = sides
    student = replace(student, tensors=tuple(tensors[:split]))
    teacher = replace(teacher, tensors=tuple(tensors[split:]))
    return TilePair.of(teacher, student, ignored) if beta == 0 else TilePair.of(student, teacher, ignored)


def _sums(pair: TilePair, *, cross: bool) -> torch.Tensor:
    """Return this rank's ``[5, tokens]``: maximum and sum of weights of both, and the sum of ``2**y * (y - v)``."""
    tokens, device = pair.ignored.shape[0], pair.ignored.device
    running = torch.zeros(5, tokens, dtype=wide_dtype(device), device=device)
    running[0] = running[2] = -math.inf
    if pair.on_triton:
        triton_divergence.add_sums(pair, running)
        return running
    for span, cols in pair.spans():
        local = _tile_sums(pair, span, cols, cross=cross).to(running.dtype)
        scales = pair.p_scale.slice_tokens(span), pair.q_scale.slice_tokens(span)
        running[:, span] = _combine(torch.stack([running[:, span], local]), *scales)
    return running


def _tile_sums(pair: TilePair, span: slice, cols: slice, *, cross: bool) -> torch.Tensor:
    p_tile, q_tile = pair.p.tile(span, cols), pair.q.tile(span, cols)
    sums = torch.zeros(5, p_tile.shape[0], dtype=pair.dtype, device=p_tile.device)
    p_scale, q_scale = pair.p_scale.slice_tokens(span), pair.q_scale.slice_tokens(span)
    for part, (p_block, q_block) in row_blocks(rows_per_workspace(p_tile.shape[1], p_tile.device), p_tile, q_tile):
        p_values, q_values = p_block.to(pair.dtype), q_block.to(pair.dtype)
        torch.amax(p_values, -1, out=sums[0, part])
        torch.amax(q_values, -1, out=sums[2, part])
        y = log2_weights(p_values, sums[0, part], p_scale.slice_tokens(part))
        v = log2_weights(q_values, sums[2, part], q_scale.slice_tokens(part))
        weights = y.exp2()
        torch.sum(weights, -1, out=sums[1, part])
        torch.sum(v.exp2(), -1, out=sums[3, part])
        if cross:
            torch.sum(_weighted(weights, y - v), -1, out=sums[4, part])
    return sums


def _weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``weights * values``, and 0 where the weight is 0, even if the value is infinite or NaN."""
    return torch.where(weights == 0, 0, weights * values)


def _combine(parts: torch.Tensor, p_scale: TemperatureScale, q_scale: TemperatureScale) -> torch.Tensor:
    """Combine ``[parts, 5, tokens]`` of disjoint columns to ``[5, tokens]``, in the widest dtype of the device."""
    p_max, p_sum, q_max, q_sum, cross = parts.to(wide_dtype(parts.device)).unbind(1)
    zeros = torch.zeros_like(p_sum)
    q = merge(PartialSoftmax(q_max, q_sum, zeros), q_scale)
    # Where all columns of a part have probability 0 under q, its cross sum is infinite already, or its weights are 0.
    rescale = rescale_exponent(q_max, q.max_logit, q_scale).masked_fill(q_max == -math.inf, 0)
    p = merge(PartialSoftmax(p_max, p_sum, zeros, cross - p_sum * rescale), p_scale)
    mean_cross = zeros[0] if p.weighted_sum is None else p.weighted_sum
    return torch.stack([p.max_logit, p.sum_exp2, q.max_logit, q.sum_exp2, mean_cross])


def _totals(combined: torch.Tensor) -> _Totals:
    p_max, p_sum, q_max, q_sum, cross = combined.unbind(0)
    bits = cross / p_sum - p_sum.log2() + q_sum.log2()
    return _Totals(p_max, p_sum, q_max, q_sum, bits, bits)


def _mixture_sums(pair: TilePair, totals: _Totals, beta: float) -> torch.Tensor:
    """Return this rank's part of ``[2, tokens]``: the divergences of ``p`` and ``q`` from their mixture in bits."""
    sums = torch.zeros(2, pair.ignored.shape[0], dtype=totals.p_sum.dtype, device=totals.p_sum.device)
    if pair.on_triton:
        numbers = totals.p_max, totals.q_max, totals.p_sum.log2(), totals.q_sum.log2()
        triton_divergence.add_sums(pair, sums, torch.stack(numbers).to(pair.dtype), 1 - beta)
        return sums
    for span, cols in pair.spans():
        blocks = pair.exponents(pair.p.tile(span, cols), pair.q.tile(span, cols), span, totals.p_max, totals.q_max)
        for part, y, v in blocks:
            p_sum, q_sum = (total[span][part, None].log2().to(y.dtype) for total in (totals.p_sum, totals.q_sum))
            log2_p, log2_q, log2_mixture = _mixture(y, v, p_sum, q_sum, 1 - beta)
            of_part = sums[:, span][:, part]
            of_part[0] += _weighted(log2_p.exp2(), log2_p - log2_mixture).sum(-1)
            of_part[1] += _weighted(log2_q.exp2(), log2_q - log2_mixture).sum(-1)
    return sums


def _mixture(
    y: torch.Tensor, v: torch.Tensor, log2_p_sum: torch.Tensor, log2_q_sum: torch.Tensor, p_share: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the base-2 logarithms of ``p``, ``q`` and ``p_share * p + (1 - p_share) * q``."""
    log2_p, log2_q = y.sub_(log2_p_sum), v.sub_(log2_q_sum)
    return log2_p, log2_q, torch.logaddexp2(log2_p + math.log2(p_share), log2_q + math.log2(1 - p_share))


def _writer(pair: TilePair, totals: _Totals, kind: int, numbers: Sequence[torch.Tensor], share: float) -> TileGradient:

    def write(tile: torch.Tensor, span: slice, cols: slice, out: torch.Tensor) -> None:
        for part, y, v in pair.exponents(tile, pair.q.tile(span, cols), span, totals.p_max, totals.q_max):
            out[part].copy_(_gradient_values(y, v, kind, [number[span][part, None] for number in numbers], share))
        zero_tokens_(out, pair.ignored[span])

    return write


def _gradient_values(
    y: torch.Tensor, v: torch.Tensor, kind: int, numbers: Sequence[torch.Tensor], share: float
) -> torch.Tensor:
    """Return the gradient of some logits of ``p``; ``numbers`` are the coefficients of its kind."""
    if kind == OF_P:  # ``p_j (log p_j - log q_j - KL(p || q)) / T``
        offset, coefficient = numbers
        return _weighted(y.exp2(), (y - v).add_(offset)).mul_(coefficient)
    if kind == OF_Q:  # ``(p_j - q_j) / T``
        p_coefficient, q_coefficient = numbers
        return y.exp2_().mul_(p_coefficient).sub_(v.exp2_().mul_(q_coefficient))
    log2_p_sum, log2_q_sum, bits, coefficient = numbers  # ``share * p_j (log p_j - log m_j - KL(p || m)) / T``
    log2_p, _, log2_mixture = _mixture(y, v, log2_p_sum, log2_q_sum, share)
    return _weighted(log2_p.exp2(), (log2_p - log2_mixture).sub_(bits)).mul_(coefficient)
