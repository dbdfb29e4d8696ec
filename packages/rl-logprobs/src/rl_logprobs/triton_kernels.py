"""Triton's side of ``triton_softmax``: one program reduces a row, one writes a block of a row's gradient.

Capitals are constants of the compiler, and arguments that are None leave their lines out of what it compiles.
"""

import triton
import triton.language as tl

from rl_logprobs.powers import FLOOR

_FLOOR = tl.constexpr(FLOOR)
_ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def power_of(values, peak, exponent, LEAST: tl.constexpr):
    """``y`` of logits relative to a peak, as in ``powers``, but never below ``FLOOR``; NaN stays."""
    return tl.maximum(
        (values - tl.maximum(peak, LEAST, propagate_nan=_ALL)) * exponent,
        _FLOOR,
        propagate_nan=_ALL,
    )


@triton.jit
def sums_kernel(
    logits,
    exponents,
    sought,
    floors,
    peaks,
    totals,
    moments,
    winners,
    larger,
    width,
    row_stride,
    column_stride,
    MOMENT: tl.constexpr,
    BEST: tl.constexpr,
    OVERWRITE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """The sums over row ``program_id(0)`` of the logits: a running peak and sums for each lane, merged at the end."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    first = logits + row * row_stride
    exponent = tl.load(exponents + row)
    peak = tl.full((BLOCK,), -float("inf"), WIDE)
    total = tl.zeros((BLOCK,), WIDE)
    moment = tl.zeros((BLOCK,), WIDE)
    winner = lanes
    count = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, width, BLOCK):
        columns = begin + lanes
        values = tl.load(first + columns * column_stride, mask=columns < width, other=-float("inf")).to(WIDE)
        if BEST:
            winner = tl.where(values > peak, columns, winner)
        if sought is not None:
            count += (values > tl.load(sought + row)).to(tl.int64)
        above = tl.maximum(peak, values, propagate_nan=_ALL)
        lag = power_of(peak, above, exponent, LEAST)
        power = power_of(values, above, exponent, LEAST)
        weight = tl.exp2(power)
        if floors is not None:
            weight = tl.where(values < tl.load(floors + row), 0.0, weight)
        if MOMENT:
            moment = (moment + total * lag) * tl.exp2(lag) + weight * power
        total = total * tl.exp2(lag) + weight
        peak = above
    top = tl.max(peak, 0)
    lag = power_of(peak, top, exponent, LEAST)
    if MOMENT:
        tl.store(moments + row, tl.sum((moment + total * lag) * tl.exp2(lag), 0))
    tl.store(totals + row, tl.sum(total * tl.exp2(lag), 0))
    tl.store(peaks + row, top)
    if BEST:
        tl.store(winners + row, tl.minimum(tl.min(tl.where(peak == top, winner, width), 0), width - 1))
    if sought is not None:
        tl.store(larger + row, tl.sum(count, 0))
    if OVERWRITE:
        for begin in range(0, width, BLOCK):
            columns = begin + lanes
            inside = columns < width
            values = tl.load(first + columns * column_stride, mask=inside, other=-float("inf")).to(WIDE)
            weight = tl.exp2(power_of(values, top, exponent, LEAST))
            if floors is not None:
                weight = tl.where(values < tl.load(floors + row), 0.0, weight)
            tl.store(first + columns * column_stride, weight.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    logits,
    out,
    exponents,
    peaks,
    coefficients,
    moments,
    floors,
    targets,
    at_targets,
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
    """Block ``program_id(1)`` of the gradient of row ``program_id(0)``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(logits + row * row_stride + columns * column_stride, mask=inside, other=-float("inf")).to(WIDE)
    coefficient = tl.load(coefficients + row)
    if peaks is None:
        found = values * coefficient
    else:
        power = power_of(values, tl.load(peaks + row), tl.load(exponents + row), LEAST)
        weight = tl.exp2(power)
        if floors is not None:
            weight = tl.where(values < tl.load(floors + row), 0.0, weight)
        if moments is not None:
            coefficient += tl.load(moments + row) * power
        found = weight * coefficient
    found += tl.where(columns == tl.load(targets + row), tl.load(at_targets + row), 0.0)
    found = tl.where(tl.load(ignored + row), 0.0, found)
    place = out + row * out_row_stride + columns * out_column_stride
    tl.store(place, found.to(out.dtype.element_ty), mask=inside)
