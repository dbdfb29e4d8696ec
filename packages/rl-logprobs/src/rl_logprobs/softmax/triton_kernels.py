"""Triton kernels of a softmax: the reduction of logits, the statistics of all ranks, and the gradient of logits.

One program of ``reduce_kernel`` reads one row.  A tile of ``UNITS x BLOCK`` columns has one running maximum and sum for
each of ``BLOCK`` lanes, so that a lane is rescaled once for ``UNITS`` columns.  The sums of a token are float64 in
``state``, ``[fields, tokens]``: maximum, sum of weights, target's logit, and where asked for the weighted sum, the
most probable id and the number of greater logits.

Names in capitals are compile-time constants.  Code under an argument that is None, the default of optional ones, is not
compiled.
"""

import math

import triton
import triton.language as tl

from rl_logprobs.softmax.log2_scale import MIN_EXPONENT

_MIN_EXPONENT = tl.constexpr(MIN_EXPONENT)
_ALL = tl.constexpr(tl.PropagateNan.ALL)
_LOG2E = tl.constexpr(math.log2(math.e))
_LEAST64 = tl.constexpr(-1.7976931348623157e308)

#: Integer arguments that do not specialize the compiled kernel.
SIZES = ("inner", "temperature_stride", "first_token", "tokens", "start", "vocab_size", "ignore_index", "initial")


@triton.jit
def exponent_of(values, max_logit, factor, LEAST: tl.constexpr):
    """Return the exponent ``y`` of logits (see ``log2_scale``), at least ``MIN_EXPONENT``, or NaN."""
    return tl.maximum(
        (values - tl.maximum(max_logit, LEAST, propagate_nan=_ALL)) * factor,
        _MIN_EXPONENT,
        propagate_nan=_ALL,
    )


@triton.jit
def factor_of(temperatures, token, temperature_stride, WIDE: tl.constexpr):
    """Return the factor that converts logit differences to exponents of two, rounded to the statistics dtype."""
    if temperatures is None:
        factor = tl.full((), _LOG2E, WIDE)
    else:
        factor = (tl.full((), _LOG2E, tl.float64) / tl.load(temperatures + token * temperature_stride)).to(WIDE)
    return factor


@triton.jit
def wide_factor_of(temperatures, token, temperature_stride, WIDE: tl.constexpr):
    """Return the factor of a block of tokens in float64, and their temperatures."""
    temperature = tl.full(token.shape, 1.0, tl.float64)
    if temperatures is not None:
        temperature = tl.load(temperatures + token * temperature_stride)
    return factor_of(temperatures, token, temperature_stride, WIDE).to(tl.float64), temperature


@triton.jit
def tanh(x, SMALL: tl.constexpr):
    """Return the hyperbolic tangent: a series below ``SMALL``, where the difference of exponentials would cancel."""
    square = x * x
    series = square * (square * (square * (square * (62 / 2835) - 17 / 315) + 2 / 15) - 1 / 3)
    return tl.where(tl.abs(x) < SMALL, x + x * series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2E)) + 1.0))


@triton.jit
def load_logits(
    first, offsets, biases, columns, inside, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr
):
    """Return the logits of some columns of a row, ``-inf`` outside; of products with a head, after its map."""
    values = tl.load(first + offsets, mask=inside, other=-float("inf")).to(WIDE)
    if biases is not None:
        values += tl.load(biases + columns, mask=inside, other=0.0).to(WIDE)
    if SCALE is not None:
        values *= SCALE
    if SOFTCAP is not None:
        values = tanh(values / SOFTCAP, 0.02 if WIDE == tl.float64 else 0.25) * SOFTCAP
    if (SCALE is not None) or (SOFTCAP is not None):
        values = tl.where(inside, values, -float("inf"))
    return values


@triton.jit
def derivative_of(values, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return the derivative of logits by the products that they were computed from."""
    derivative = tl.full(values.shape, 1.0 if SCALE is None else SCALE, values.dtype)
    if SOFTCAP is not None:
        derivative *= 1.0 - (values / SOFTCAP) * (values / SOFTCAP)
    return derivative


@triton.jit
def offsets_of(columns, column_stride, CONTIGUOUS: tl.constexpr):
    """Return the offsets of columns in a row, in 64 bits where a stride multiplies them."""
    return columns if CONTIGUOUS else columns.to(tl.int64) * column_stride


@triton.jit
def row_offset(row, inner, outer_stride, row_stride):
    """Return the offset of a row of two leading dims, the second of size ``inner``."""
    return (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * row_stride


@triton.jit(do_not_specialize=SIZES)
def reduce_kernel(
    logits, targets, temperatures, state, width, inner, outer_stride, row_stride, column_stride, temperature_stride,
    first_token, tokens, start, vocab_size, ignore_index, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr,
    RANK: tl.constexpr, CONTIGUOUS: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr, LEAST: tl.constexpr, biases=None, min_logits=None, greater_than=None, valid=None, weights=None,
    expected_rows=None, initial=1, features=0, SCALE: tl.constexpr = None, SOFTCAP: tl.constexpr = None,
    MERGE: tl.constexpr = False,
):  # fmt: skip
    """Reduce row ``program_id(0)`` into the token's ``state``; ``MERGE`` adds to the sums of earlier columns."""
    # ``weights`` receives the weights of the row's logits relative to the maximum so far, times their derivative;
    # ``expected_rows`` are sums of such weights times rows of a head, and follow the maximum. A token that is not
    # scored reads no logit. Lanes count in int32, which needs fewer registers than int64.
    row = tl.program_id(0)
    token = first_token + row
    target = tl.load(targets + token)
    scored = target != ignore_index
    if valid is not None:
        tl.store(valid, 0, mask=scored & ((target < 0) | (target >= vocab_size)))
    column = target - start
    owned = scored & (column >= 0) & (column < width)
    row_start = row_offset(row, inner, outer_stride, row_stride)
    first = logits + row_start
    factor = factor_of(temperatures, token, temperature_stride, WIDE)
    target_logit = load_logits(first, column * column_stride, biases, column, owned, SCALE, SOFTCAP, WIDE)
    target_logit = tl.where(owned, target_logit, 0.0)
    threshold = target_logit
    if greater_than is not None:
        threshold = tl.load(greater_than + token)
    end = tl.where(scored, width, 0)
    lanes = tl.arange(0, BLOCK)
    units = tl.arange(0, UNITS)
    max_logit = tl.full((BLOCK,), -float("inf"), WIDE)
    sum_exp2 = tl.zeros((BLOCK,), WIDE)
    weighted_sum = tl.zeros((BLOCK,), WIDE)
    argmax = lanes
    count = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.range(0, end, UNITS * BLOCK, num_stages=STAGES):
        columns = begin + units[:, None] * BLOCK + lanes[None, :]
        offsets = offsets_of(columns, column_stride, CONTIGUOUS)
        values = load_logits(first, offsets, biases, columns, columns < width, SCALE, SOFTCAP, WIDE)
        tile_max = tl.max(values, 0)
        if ARGMAX:
            candidate = tl.min(tl.where(values == tile_max[None, :], columns, width), 0)
            argmax = tl.where(tile_max > max_logit, candidate, argmax)
        if RANK:
            count += tl.sum((values > threshold).to(tl.int32), 0)
        new_max = tl.maximum(max_logit, tile_max, propagate_nan=_ALL)
        rescale = exponent_of(max_logit, new_max, factor, LEAST)
        if ENTROPY:
            exponent = exponent_of(values, new_max[None, :], factor, LEAST)
        else:
            exponent = (values - tl.maximum(new_max, LEAST, propagate_nan=_ALL)[None, :]) * factor
        weight = tl.exp2(exponent)
        if min_logits is not None:
            weight = tl.where(values < tl.load(min_logits + token), 0.0, weight)
        if ENTROPY:
            weighted_sum = (weighted_sum + sum_exp2 * rescale) * tl.exp2(rescale) + tl.sum(weight * exponent, 0)
        sum_exp2 = sum_exp2 * tl.exp2(rescale) + tl.sum(weight, 0)
        max_logit = new_max
    row_max = tl.max(max_logit, 0)
    rescale = exponent_of(max_logit, row_max, factor, LEAST)
    row_weighted = tl.sum((weighted_sum + sum_exp2 * rescale) * tl.exp2(rescale), 0).to(tl.float64)
    row_sum = tl.sum(sum_exp2 * tl.exp2(rescale), 0).to(tl.float64)
    id_of_max = start + tl.minimum(tl.min(tl.where(max_logit == row_max, argmax, width), 0), width - 1)
    if min_logits is not None:
        target_logit = tl.where(owned & (target_logit < tl.load(min_logits + token)), -float("inf"), target_logit)
    destination = state + token
    stride = tokens.to(tl.int64)
    ranking = destination + (3 + ENTROPY) * stride
    if MERGE:
        earlier = initial == 0
        old_max = tl.load(destination, mask=earlier, other=-float("inf")).to(WIDE)
        total_max = tl.maximum(old_max, row_max, propagate_nan=_ALL)
        old_rescale = exponent_of(old_max, total_max, factor, LEAST)
        rescale_row = exponent_of(row_max, total_max, factor, LEAST)
        old_factor = tl.exp2(old_rescale)
        row_factor = tl.exp2(rescale_row)
        old_sum = tl.load(destination + stride, mask=earlier, other=0.0)
        if ENTROPY:
            old_weighted = tl.load(destination + 3 * stride, mask=earlier, other=0.0)
            row_weighted = (row_weighted + row_sum * rescale_row) * row_factor
            row_weighted += (old_weighted + old_sum * old_rescale) * old_factor
        if ARGMAX:
            old_id = tl.load(ranking, mask=earlier, other=0.0)
            id_of_max = tl.where(earlier & (old_max >= row_max), old_id, id_of_max.to(tl.float64))
        row_sum = old_sum * old_factor + row_sum * row_factor
        target_logit += tl.load(destination + 2 * stride, mask=earlier, other=0.0)
        if expected_rows is not None:
            if old_factor != 1.0:
                sums = expected_rows + token.to(tl.int64) * features
                for begin in range(0, features, BLOCK):
                    inside = begin + lanes < features
                    tl.store(sums + begin + lanes, tl.load(sums + begin + lanes, mask=inside) * old_factor, mask=inside)
        row_max = total_max
    tl.store(destination, row_max)
    tl.store(destination + stride, row_sum)
    tl.store(destination + 2 * stride, target_logit)
    if ENTROPY:
        tl.store(destination + 3 * stride, row_weighted)
    if ARGMAX:
        tl.store(ranking, id_of_max)
    if RANK:
        tl.store(ranking + ARGMAX * stride, tl.sum(count, 0))
    if weights is not None:
        for begin in tl.range(0, end, UNITS * BLOCK, num_stages=STAGES):
            columns = begin + units[:, None] * BLOCK + lanes[None, :]
            offsets = offsets_of(columns, column_stride, CONTIGUOUS)
            inside = columns < width
            values = load_logits(first, offsets, biases, columns, inside, SCALE, SOFTCAP, WIDE)
            weight = tl.exp2(exponent_of(values, row_max, factor, LEAST))
            if min_logits is not None:
                weight = tl.where(values < tl.load(min_logits + token), 0.0, weight)
            if (SCALE is not None) or (SOFTCAP is not None):
                weight *= derivative_of(values, SCALE, SOFTCAP)
            tl.store(weights + row_start + offsets, weight.to(weights.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def finish_kernel(
    gathered, targets, temperatures, logprobs, logsumexp, entropy, argmax, target_rank, totals, temperature_stride,
    tokens, ignore_index, ranks, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, RANK: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Combine the ``state`` of all ranks to the statistics of ``BLOCK`` tokens, and the totals of the gradient."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    token = tl.minimum(token, tokens - 1)
    scored = tl.load(targets + token) != ignore_index
    factor, temperature = wide_factor_of(temperatures, token, temperature_stride, WIDE)
    nats = 1.0 / (factor * temperature)
    stride = tokens.to(tl.int64)
    max_logit = tl.full((BLOCK,), -float("inf"), tl.float64)
    sum_exp2 = tl.zeros((BLOCK,), tl.float64)
    target_logit = tl.zeros((BLOCK,), tl.float64)
    weighted_sum = tl.zeros((BLOCK,), tl.float64)
    id_of_max = tl.zeros((BLOCK,), tl.float64)
    count = tl.zeros((BLOCK,), tl.float64)
    for rank in range(ranks):
        part = gathered + rank * (3 + ENTROPY + ARGMAX + RANK) * stride + token
        part_max = tl.load(part)
        part_sum = tl.load(part + stride)
        new_max = tl.maximum(max_logit, part_max, propagate_nan=_ALL)
        rescale = exponent_of(max_logit, new_max, factor, _LEAST64)
        part_rescale = exponent_of(part_max, new_max, factor, _LEAST64)
        if ENTROPY:
            weighted_sum = (weighted_sum + sum_exp2 * rescale) * tl.exp2(rescale)
            weighted_sum += (tl.load(part + 3 * stride) + part_sum * part_rescale) * tl.exp2(part_rescale)
        if ARGMAX:
            part_id = tl.load(part + (3 + ENTROPY) * stride)
            id_of_max = tl.where((part_max > max_logit) | (rank == 0), part_id, id_of_max)
        if RANK:
            count += tl.load(part + (3 + ENTROPY + ARGMAX) * stride)
        sum_exp2 = sum_exp2 * tl.exp2(rescale) + part_sum * tl.exp2(part_rescale)
        target_logit += tl.load(part + 2 * stride)
        max_logit = new_max
    log2_sum = tl.log2(sum_exp2)
    logprob = ((target_logit - max_logit) * factor - log2_sum) * nats
    tl.store(logprobs + token, tl.where(scored, logprob, 0.0), mask=inside)
    tl.store(logsumexp + token, tl.where(scored, max_logit / temperature + log2_sum * nats, 0.0), mask=inside)
    if ENTROPY:
        mean = weighted_sum / sum_exp2
        tl.store(entropy + token, tl.where(scored, (log2_sum - mean) * nats, 0.0), mask=inside)
        tl.store(totals + 3 * stride + token, mean, mask=inside)
    if ARGMAX:
        tl.store(argmax + token, tl.where(scored, id_of_max, 0.0).to(tl.int64), mask=inside)
    if RANK:
        tl.store(target_rank + token, tl.where(scored, count, 0.0).to(tl.int64), mask=inside)
    tl.store(totals + token, max_logit, mask=inside)
    tl.store(totals + stride + token, sum_exp2, mask=inside)
    tl.store(totals + 2 * stride + token, tl.where(target_logit == -float("inf"), 0.0, 1.0), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def coefficient_kernel(
    totals, targets, temperatures, local_max, d_logprobs, d_logsumexp, d_entropy, coefficients, logprobs_stride,
    logsumexp_stride, entropy_stride, temperature_stride, tokens, ignore_index, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Write ``[3, tokens]``: the factors of ``2**y``, ``2**y * y`` and the target in the gradient of the logits."""
    # ``local_max`` is the reference of weights that replaced the logits, or None.
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    token = tl.minimum(token, tokens - 1)
    scored = tl.load(targets + token) != ignore_index
    factor, temperature = wide_factor_of(temperatures, token, temperature_stride, WIDE)
    stride = tokens.to(tl.int64)
    sum_exp2 = tl.load(totals + stride + token)
    d_target = tl.zeros((BLOCK,), tl.float64)
    if d_logprobs is not None:
        d_target = tl.load(d_logprobs + token * logprobs_stride).to(tl.float64)
        d_target = tl.where(tl.load(totals + 2 * stride + token) == 0.0, 0.0, d_target)
    d_weight = -d_target
    if d_logsumexp is not None:
        d_weight += tl.load(d_logsumexp + token * logsumexp_stride).to(tl.float64)
    d_weighted = tl.zeros((BLOCK,), tl.float64)
    if d_entropy is not None:
        d_bits = tl.load(d_entropy + token * entropy_stride).to(tl.float64) / (factor * temperature)
        d_weight += d_bits * tl.load(totals + 3 * stride + token)
        d_weighted = -d_bits / (temperature * sum_exp2)
    d_weight = d_weight / (temperature * sum_exp2)
    if local_max is not None:
        d_weight *= tl.exp2(exponent_of(tl.load(local_max + token), tl.load(totals + token), factor, _LEAST64))
    tl.store(coefficients + token, tl.where(scored, d_weight, 0.0), mask=inside)
    tl.store(coefficients + stride + token, tl.where(scored, d_weighted, 0.0), mask=inside)
    tl.store(coefficients + 2 * stride + token, tl.where(scored, d_target / temperature, 0.0), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def gradient_kernel(
    logits, out, targets, temperatures, coefficients, width, out_width, inner, outer_stride, row_stride,
    column_stride, out_outer_stride, out_row_stride, out_column_stride, temperature_stride, first_token, tokens, start,
    ignore_index, ENTROPY: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    LEAST: tl.constexpr, biases=None, min_logits=None, totals=None, SCALE: tl.constexpr = None,
    SOFTCAP: tl.constexpr = None,
):  # fmt: skip
    """Write block ``program_id(1)`` of the gradient of row ``program_id(0)``; 0 in columns beyond ``width``."""
    # ``totals`` is None where weights have replaced the logits. A token that is not scored reads no logit.
    row = tl.program_id(0)
    token = first_token + row
    target = tl.load(targets + token)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < tl.where(target != ignore_index, width, 0)
    first = logits + row_offset(row, inner, outer_stride, row_stride)
    offsets = offsets_of(columns, column_stride, CONTIGUOUS)
    values = load_logits(first, offsets, biases, columns, inside, SCALE, SOFTCAP, WIDE)
    stride = tokens.to(tl.int64)
    coefficient = tl.load(coefficients + token)
    if totals is None:
        result = values * coefficient
    else:
        factor = factor_of(temperatures, token, temperature_stride, WIDE)
        exponent = exponent_of(values, tl.load(totals + token).to(WIDE), factor, LEAST)
        weight = tl.exp2(exponent)
        if min_logits is not None:
            weight = tl.where(values < tl.load(min_logits + token), 0.0, weight)
        if ENTROPY:
            result = weight * (coefficient + tl.load(coefficients + stride + token) * exponent)
        else:
            result = weight * coefficient
    result += tl.where(columns == target - start, tl.load(coefficients + 2 * stride + token), 0.0)
    if (SCALE is not None) or (SOFTCAP is not None):
        result *= derivative_of(values, SCALE, SOFTCAP)
    destination = out + row_offset(row, inner, out_outer_stride, out_row_stride)
    destination += offsets_of(columns, out_column_stride, CONTIGUOUS)
    tl.store(destination, tl.where(inside, result, 0.0).to(out.dtype.element_ty), mask=columns < out_width)
