"""Triton kernels of two softmaxes ``p`` and ``q``: their sums, their divergences from a mixture, and a gradient.

``state``, ``[5, tokens]`` float64, has maximum and sum of weights of ``p``, these of ``q``, and the sum of ``2**y``
times ``y - v`` (see ``divergence``).  ``numbers``, ``[6, tokens]``, has the maxima of both and up to four coefficients.
"""

import triton
import triton.language as tl

from rl_logprobs.softmax.triton_kernels import derivative_of, exponent_of, factor_of, load_logits, row_offset

_ALL = tl.constexpr(tl.PropagateNan.ALL)

#: Integer arguments that do not specialize the compiled kernel.
SIZES = ("inner", "p_temperature_stride", "q_temperature_stride", "first_token", "tokens")


@triton.jit
def exponents(values, max_logit, factor, LEAST: tl.constexpr):
    """Return the exponents of logits relative to a maximum; ``-inf`` for ``-inf``."""
    return (values - tl.maximum(max_logit, LEAST, propagate_nan=_ALL)) * factor


@triton.jit
def weighted(weights, values):
    """Return ``weights * values``, and 0 where the weight is 0, even if the value is infinite or NaN."""
    return tl.where(weights == 0.0, 0.0, weights * values)


@triton.jit
def rescaled(p_max, p_sum, q_max, cross, new_p, new_q, p_factor, q_factor, LEAST: tl.constexpr):
    """Return the sum of ``p`` and the cross sum relative to larger maxima."""
    # Where all columns so far have probability 0 under q, the cross sum is infinite already, or its weights are 0.
    p_shift = exponent_of(p_max, new_p, p_factor, LEAST)
    q_shift = tl.where(q_max == -float("inf"), 0.0, exponent_of(q_max, new_q, q_factor, LEAST))
    scale = tl.exp2(p_shift)
    return p_sum * scale, weighted(scale, cross + p_sum * (p_shift - q_shift))


@triton.jit
def log2_mixture_of(log2_p, log2_q, log2_shares, log2_other_share, LEAST: tl.constexpr):
    """Return the base-2 logarithm of the mixture of two probabilities."""
    a = log2_p + log2_shares
    b = log2_q + log2_other_share
    largest = tl.maximum(tl.maximum(a, b), LEAST)
    return largest + tl.log2(tl.exp2(a - largest) + tl.exp2(b - largest))


@triton.jit(do_not_specialize=SIZES)
def sums_kernel(
    p_logits, q_logits, p_temperatures, q_temperatures, ignored, numbers, state, width, inner, p_outer_stride,
    p_row_stride, p_column_stride, q_outer_stride, q_row_stride, q_column_stride, p_temperature_stride,
    q_temperature_stride, first_token, tokens, LOG2_SHARE: tl.constexpr, LOG2_OTHER_SHARE: tl.constexpr,
    MIXTURE: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
    LEAST: tl.constexpr, p_biases=None, q_biases=None, P_SCALE: tl.constexpr = None, P_SOFTCAP: tl.constexpr = None,
    Q_SCALE: tl.constexpr = None, Q_SOFTCAP: tl.constexpr = None,
):  # fmt: skip
    """Add row ``program_id(0)`` of both to ``state``; with ``MIXTURE`` divergences in bits to its first two rows."""
    row = tl.program_id(0)
    token = first_token + row
    stride = tokens.to(tl.int64)
    end = tl.where(tl.load(ignored + token) != 0, 0, width)
    p_first = p_logits + row_offset(row, inner, p_outer_stride, p_row_stride)
    q_first = q_logits + row_offset(row, inner, q_outer_stride, q_row_stride)
    p_factor = factor_of(p_temperatures, token, p_temperature_stride, WIDE)
    q_factor = factor_of(q_temperatures, token, q_temperature_stride, WIDE)
    lanes = tl.arange(0, BLOCK)
    units = tl.arange(0, UNITS)
    p_max = tl.full((BLOCK,), -float("inf"), WIDE)
    q_max = tl.full((BLOCK,), -float("inf"), WIDE)
    p_sum = tl.zeros((BLOCK,), WIDE)
    q_sum = tl.zeros((BLOCK,), WIDE)
    cross = tl.zeros((BLOCK,), WIDE)
    for begin in tl.range(0, end, UNITS * BLOCK, num_stages=STAGES):
        columns = begin + units[:, None] * BLOCK + lanes[None, :]
        inside = columns < width
        p_offsets = columns.to(tl.int64) * p_column_stride
        q_offsets = columns.to(tl.int64) * q_column_stride
        x = load_logits(p_first, p_offsets, p_biases, columns, inside, P_SCALE, P_SOFTCAP, WIDE)
        z = load_logits(q_first, q_offsets, q_biases, columns, inside, Q_SCALE, Q_SOFTCAP, WIDE)
        if MIXTURE:
            log2_p = exponents(x, tl.load(numbers + token), p_factor, LEAST) - tl.load(numbers + 2 * stride + token)
            log2_q = exponents(z, tl.load(numbers + stride + token), q_factor, LEAST)
            log2_q -= tl.load(numbers + 3 * stride + token)
            log2_mixture = log2_mixture_of(log2_p, log2_q, LOG2_SHARE, LOG2_OTHER_SHARE, LEAST)
            p_sum += tl.sum(weighted(tl.exp2(log2_p), log2_p - log2_mixture), 0)
            q_sum += tl.sum(weighted(tl.exp2(log2_q), log2_q - log2_mixture), 0)
        else:
            new_p = tl.maximum(p_max, tl.max(x, 0), propagate_nan=_ALL)
            new_q = tl.maximum(q_max, tl.max(z, 0), propagate_nan=_ALL)
            y = exponents(x, new_p[None, :], p_factor, LEAST)
            v = exponents(z, new_q[None, :], q_factor, LEAST)
            weights = tl.exp2(y)
            p_sum, cross = rescaled(p_max, p_sum, q_max, cross, new_p, new_q, p_factor, q_factor, LEAST)
            p_sum += tl.sum(weights, 0)
            cross += tl.sum(weighted(weights, y - v), 0)
            q_sum = q_sum * tl.exp2(exponent_of(q_max, new_q, q_factor, LEAST)) + tl.sum(tl.exp2(v), 0)
            p_max = new_p
            q_max = new_q
    destination = state + token
    if MIXTURE:
        tl.store(destination, tl.load(destination) + tl.sum(p_sum, 0).to(tl.float64))
        tl.store(destination + stride, tl.load(destination + stride) + tl.sum(q_sum, 0).to(tl.float64))
    else:
        row_p = tl.max(p_max, 0)
        row_q = tl.max(q_max, 0)
        p_sum, cross = rescaled(p_max, p_sum, q_max, cross, row_p, row_q, p_factor, q_factor, LEAST)
        q_sum = q_sum * tl.exp2(exponent_of(q_max, row_q, q_factor, LEAST))
        old_p = tl.load(destination).to(WIDE)
        old_q = tl.load(destination + 2 * stride).to(WIDE)
        new_p = tl.maximum(old_p, row_p, propagate_nan=_ALL)
        new_q = tl.maximum(old_q, row_q, propagate_nan=_ALL)
        row_sum = tl.sum(p_sum, 0).to(tl.float64)
        row_cross = tl.sum(cross, 0).to(tl.float64)
        row_sum, row_cross = rescaled(row_p, row_sum, row_q, row_cross, new_p, new_q, p_factor, q_factor, LEAST)
        old_sum = tl.load(destination + stride)
        old_cross = tl.load(destination + 4 * stride)
        old_sum, old_cross = rescaled(old_p, old_sum, old_q, old_cross, new_p, new_q, p_factor, q_factor, LEAST)
        total_q = tl.sum(q_sum, 0).to(tl.float64) * tl.exp2(exponent_of(row_q, new_q, q_factor, LEAST))
        total_q += tl.load(destination + 3 * stride) * tl.exp2(exponent_of(old_q, new_q, q_factor, LEAST))
        tl.store(destination, new_p)
        tl.store(destination + stride, old_sum + row_sum)
        tl.store(destination + 2 * stride, new_q)
        tl.store(destination + 3 * stride, total_q)
        tl.store(destination + 4 * stride, old_cross + row_cross)


@triton.jit(do_not_specialize=SIZES)
def divergence_gradient_kernel(
    p_logits, q_logits, p_temperatures, q_temperatures, ignored, numbers, out, width, out_width, inner, p_outer_stride,
    p_row_stride, p_column_stride, q_outer_stride, q_row_stride, q_column_stride, out_outer_stride, out_row_stride,
    out_column_stride, p_temperature_stride, q_temperature_stride, first_token, tokens, LOG2_SHARE: tl.constexpr,
    LOG2_OTHER_SHARE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, LEAST: tl.constexpr,
    p_biases=None, q_biases=None, P_SCALE: tl.constexpr = None, P_SOFTCAP: tl.constexpr = None,
    Q_SCALE: tl.constexpr = None, Q_SOFTCAP: tl.constexpr = None,
):  # fmt: skip
    """Write block ``program_id(1)`` of the gradient by the products of ``p`` of row ``program_id(0)``."""
    # KIND is the kind of gradient in ``divergence``: 0 ``OF_P``, 1 ``OF_Q``, 2 ``MIXED``.
    row = tl.program_id(0)
    token = first_token + row
    stride = tokens.to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < tl.where(tl.load(ignored + token) != 0, 0, width)
    p_first = p_logits + row_offset(row, inner, p_outer_stride, p_row_stride)
    q_first = q_logits + row_offset(row, inner, q_outer_stride, q_row_stride)
    p_offsets = columns.to(tl.int64) * p_column_stride
    q_offsets = columns.to(tl.int64) * q_column_stride
    x = load_logits(p_first, p_offsets, p_biases, columns, inside, P_SCALE, P_SOFTCAP, WIDE)
    z = load_logits(q_first, q_offsets, q_biases, columns, inside, Q_SCALE, Q_SOFTCAP, WIDE)
    p_factor = factor_of(p_temperatures, token, p_temperature_stride, WIDE)
    q_factor = factor_of(q_temperatures, token, q_temperature_stride, WIDE)
    y = exponents(x, tl.load(numbers + token), p_factor, LEAST)
    v = exponents(z, tl.load(numbers + stride + token), q_factor, LEAST)
    first = tl.load(numbers + 2 * stride + token)
    second = tl.load(numbers + 3 * stride + token)
    if KIND == 0:
        result = weighted(tl.exp2(y), y - v + first) * second
    elif KIND == 1:
        result = tl.exp2(y) * first - tl.exp2(v) * second
    else:
        log2_p = y - first
        log2_mixture = log2_mixture_of(log2_p, v - second, LOG2_SHARE, LOG2_OTHER_SHARE, LEAST)
        excess = log2_p - log2_mixture - tl.load(numbers + 4 * stride + token)
        result = weighted(tl.exp2(log2_p), excess) * tl.load(numbers + 5 * stride + token)
    if (P_SCALE is not None) or (P_SOFTCAP is not None):
        result *= derivative_of(x, P_SCALE, P_SOFTCAP)
    destination = out + row_offset(row, inner, out_outer_stride, out_row_stride)
    destination += columns.to(tl.int64) * out_column_stride
    tl.store(destination, tl.where(inside, result, 0.0).to(out.dtype.element_ty), mask=columns < out_width)
