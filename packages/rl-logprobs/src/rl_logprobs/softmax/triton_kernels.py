"""Triton kernels of ``triton_backend``: one reduces a row of logits, the other writes a block of a row's gradient.

Names in capitals are compile-time constants.  Code under an argument that is None is not compiled.
"""

import triton
import triton.language as tl

from rl_logprobs.softmax.log2_scale import MIN_EXPONENT

_MIN_EXPONENT = tl.constexpr(MIN_EXPONENT)
_ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def exponent_of(values, max_logit, factor, LEAST: tl.constexpr):
    """Return the exponent ``y`` of logits (see ``log2_scale``), at least ``MIN_EXPONENT``, or NaN."""
    return tl.maximum(
        (values - tl.maximum(max_logit, LEAST, propagate_nan=_ALL)) * factor,
        _MIN_EXPONENT,
        propagate_nan=_ALL,
    )


@triton.jit
def reduce_kernel(
    logits,
    factors,
    greater_than,
    min_logits,
    max_logits,
    sums_exp2,
    weighted_sums,
    argmaxes,
    num_greater,
    width,
    row_stride,
    column_stride,
    WEIGHTED_SUM: tl.constexpr,
    ARGMAX: tl.constexpr,
    OVERWRITE: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Reduce row ``program_id(0)`` of the logits: a running maximum and sums per lane, combined at the end."""
    # ``STAGES - 1`` blocks of the row are loaded ahead. Lanes count in int32, which needs fewer registers than int64.
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    first = logits + row * row_stride
    factor = tl.load(factors + row)
    max_logit = tl.full((BLOCK,), -float("inf"), WIDE)
    sum_exp2 = tl.zeros((BLOCK,), WIDE)
    weighted_sum = tl.zeros((BLOCK,), WIDE)
    argmax = lanes
    count = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.range(0, width, BLOCK, num_stages=STAGES):
        columns = begin + lanes
        values = tl.load(first + columns.to(tl.int64) * column_stride, mask=columns < width, other=-float("inf")).to(
            WIDE
        )
        if ARGMAX:
            argmax = tl.where(values > max_logit, columns, argmax)
        if greater_than is not None:
            count += (values > tl.load(greater_than + row)).to(tl.int32)
        new_max = tl.maximum(max_logit, values, propagate_nan=_ALL)
        rescale = exponent_of(max_logit, new_max, factor, LEAST)
        exponent = exponent_of(values, new_max, factor, LEAST)
        weight = tl.exp2(exponent)
        if min_logits is not None:
            weight = tl.where(values < tl.load(min_logits + row), 0.0, weight)
        if WEIGHTED_SUM:
            weighted_sum = (weighted_sum + sum_exp2 * rescale) * tl.exp2(rescale) + weight * exponent
        sum_exp2 = sum_exp2 * tl.exp2(rescale) + weight
        max_logit = new_max
    row_max = tl.max(max_logit, 0)
    rescale = exponent_of(max_logit, row_max, factor, LEAST)
    if WEIGHTED_SUM:
        tl.store(weighted_sums + row, tl.sum((weighted_sum + sum_exp2 * rescale) * tl.exp2(rescale), 0))
    tl.store(sums_exp2 + row, tl.sum(sum_exp2 * tl.exp2(rescale), 0))
    tl.store(max_logits + row, row_max)
    if ARGMAX:
        tl.store(argmaxes + row, tl.minimum(tl.min(tl.where(max_logit == row_max, argmax, width), 0), width - 1))
    if greater_than is not None:
        tl.store(num_greater + row, tl.sum(count, 0))
    if OVERWRITE:
        for begin in tl.range(0, width, BLOCK, num_stages=STAGES):
            columns = begin + lanes
            inside = columns < width
            values = tl.load(first + columns.to(tl.int64) * column_stride, mask=inside, other=-float("inf")).to(WIDE)
            weight = tl.exp2(exponent_of(values, row_max, factor, LEAST))
            if min_logits is not None:
                weight = tl.where(values < tl.load(min_logits + row), 0.0, weight)
            tl.store(first + columns.to(tl.int64) * column_stride, weight.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    logits,
    out,
    factors,
    max_logits,
    weight_coefs,
    weighted_coefs,
    min_logits,
    targets,
    target_coefs,
    ignored,
    width,
    row_stride,
    column_stride,
    out_row_stride,
    out_column_stride,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Write block ``program_id(1)`` of the gradient of row ``program_id(0)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(logits + row * row_stride + columns * column_stride, mask=inside, other=-float("inf")).to(WIDE)
    weight_coef = tl.load(weight_coefs + row)
    if max_logits is None:
        result = values * weight_coef
    else:
        exponent = exponent_of(values, tl.load(max_logits + row), tl.load(factors + row), LEAST)
        weight = tl.exp2(exponent)
        if min_logits is not None:
            weight = tl.where(values < tl.load(min_logits + row), 0.0, weight)
        if weighted_coefs is not None:
            weight_coef += tl.load(weighted_coefs + row) * exponent
        result = weight * weight_coef
    result += tl.where(columns == tl.load(targets + row), tl.load(target_coefs + row), 0.0)
    result = tl.where(tl.load(ignored + row), 0.0, result)
    destination = out + row * out_row_stride + columns * out_column_stride
    tl.store(destination, result.to(out.dtype.element_ty), mask=inside)
