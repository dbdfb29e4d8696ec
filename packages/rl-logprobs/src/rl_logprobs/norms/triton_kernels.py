"""Triton kernels over a table of chunks of many tensors: sums of powers, and scaling in place.

Row ``program_id(0)`` of the table, ``[chunks, 3]``, has the address of a chunk, its number of elements, and the bits of
the float64 factor on its sum.
"""

import triton
import triton.language as tl


@triton.jit
def chunk(table, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the first element of a program's chunk and the number of elements."""
    row = table + 3 * tl.program_id(0).to(tl.int64)
    first = tl.load(row).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(first, 16) if ALIGNED else first, tl.load(row + 1).to(tl.int32)


@triton.jit
def added(total, values, ORDER: tl.constexpr, LARGEST: tl.constexpr):
    """Return ``total + |x| ** ORDER``, or with ``LARGEST`` the larger of ``total`` and ``|x|``."""
    if LARGEST:
        total = tl.maximum(total, tl.abs(values), propagate_nan=tl.PropagateNan.ALL)
    elif ORDER == 2.0:
        total += values * values
    elif ORDER == 1.0:
        total += tl.abs(values)
    else:
        total += tl.exp2(tl.log2(tl.abs(values)) * ORDER)
    return total


@triton.jit
def power_kernel(
    table, powers, ELEMENT: tl.constexpr, WIDE: tl.constexpr, ORDER: tl.constexpr, LARGEST: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of powers of a chunk, or with ``LARGEST`` the largest absolute value, in float64."""
    # Squares are summed in float32, and again in float64 where their sum is near the bounds of float32.
    first, length = chunk(table, ELEMENT, ALIGNED)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), WIDE)
    if length == CHUNK:
        for begin in range(0, CHUNK, BLOCK):
            total = added(total, tl.load(first + begin + lanes).to(WIDE), ORDER, LARGEST)
    else:
        for begin in range(0, length, BLOCK):
            values = tl.load(first + begin + lanes, mask=begin + lanes < length, other=0.0)
            total = added(total, values.to(WIDE), ORDER, LARGEST)
    if LARGEST:
        # The maximum of a row loses NaN, which the sum of comparisons keeps.
        undefined = tl.sum((total != total).to(tl.int32), 0)
        tl.store(powers + tl.program_id(0), tl.where(undefined > 0, float("nan"), tl.max(total, 0)))
    else:
        power = tl.sum(total, 0).to(tl.float64)
        if WIDE == tl.float32:
            if (power < 1e-25) | (power > 1e37) | (power != power):
                exact = tl.zeros((BLOCK,), tl.float64)
                for begin in range(0, length, BLOCK):
                    values = tl.load(first + begin + lanes, mask=begin + lanes < length, other=0.0)
                    exact = added(exact, values.to(tl.float64), ORDER, LARGEST)
                power = tl.sum(exact, 0)
        weight = tl.load(table + 3 * tl.program_id(0).to(tl.int64) + 2).to(tl.float64, bitcast=True)
        tl.store(powers + tl.program_id(0), power * weight)


@triton.jit
def scale_kernel(
    table, factor, ELEMENT: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply a chunk by a factor below 1, or NaN; touch nothing for other factors."""
    number = tl.load(factor)
    if (number < 1.0) | (number != number):
        scale = number.to(WIDE)
        first, length = chunk(table, ELEMENT, ALIGNED)
        lanes = tl.arange(0, BLOCK)
        if length == CHUNK:
            for begin in range(0, CHUNK, BLOCK):
                values = tl.load(first + begin + lanes).to(WIDE) * scale
                tl.store(first + begin + lanes, values.to(ELEMENT))
        else:
            for begin in range(0, length, BLOCK):
                inside = begin + lanes < length
                values = tl.load(first + begin + lanes, mask=inside).to(WIDE) * scale
                tl.store(first + begin + lanes, values.to(ELEMENT), mask=inside)
