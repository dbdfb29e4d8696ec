"""The arithmetic of ``softmax`` in Triton kernels: half-precision logits are read once, in no workspace.

A program reduces one row, with one running peak and sum for each of its lanes; they meet at the end of the row.  The
backward pass is one program for each block of a row.  Imported only where Triton is asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from rl_logprobs.powers import Scale
from rl_logprobs.rows import row_blocks, statistics_dtype
from rl_logprobs.softmax import LogitGradient, Sums, TargetColumns, target_logits
from rl_logprobs.triton_kernels import gradient_kernel, sums_kernel

#: Columns that a program has in hand at once, at most.
LARGEST_BLOCK = 4096

_LEAST = {torch.float32: torch.finfo(torch.float32).min, torch.float64: torch.finfo(torch.float64).min}
_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


def column_sums(
    logits: torch.Tensor,
    targets: TargetColumns,
    scale: Scale,
    start: int,
    *,
    moment: bool = False,
    best: bool = False,
    sought: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
    overwrite: bool = False,
) -> Sums:
    """What ``softmax.column_sums`` does, with the same arguments."""
    dtype, tokens, width = statistics_dtype(logits.dtype), targets.column.shape[0], logits.shape[-1]
    target = target_logits(logits, targets)
    peak = logits.new_full((tokens,), -math.inf, dtype=dtype)
    total, moments = logits.new_zeros(2, tokens, dtype=dtype).unbind(0)
    winners, larger = targets.column.new_zeros(2, tokens).unbind(0)
    exponent = _of_tokens(scale.exponent, total)
    held = _written(logits) if overwrite else logits
    for span, (block,) in row_blocks(tokens, held) if width else ():
        sums_kernel[(len(block),)](
            block,
            exponent[span],
            None if sought is None else sought.contiguous()[span],
            None if floor is None else floor.contiguous()[span],
            peak[span],
            total[span],
            moments[span],
            winners[span],
            larger[span],
            width,
            *block.stride(),
            MOMENT=moment,
            BEST=best,
            OVERWRITE=overwrite,
            **_compiled_for(dtype, width),
        )
    if held is not logits:
        logits.copy_(held)
    return Sums(
        peak=peak,
        total=total,
        target=target if floor is None else target.masked_fill(targets.owned & (target < floor), -math.inf),
        moment=moments if moment else None,
        best=winners + start if best else None,
        larger=None if sought is None else larger,
    )


def write_gradient(
    logits: torch.Tensor, targets: TargetColumns, gradient: LogitGradient, scale: Scale, out: torch.Tensor
) -> None:
    """What ``softmax.write_gradient`` does, for one target a token."""
    width, tokens = logits.shape[-1], gradient.power.shape[0]
    if width == 0:
        return
    exponent = _of_tokens(scale.exponent, gradient.power)
    options = _compiled_for(statistics_dtype(logits.dtype), width)
    at_target = gradient.target.where(targets.owned, 0)
    written = _written(out)
    for span, (block, sink) in row_blocks(tokens, logits, written):
        gradient_kernel[(len(block), triton.cdiv(width, options["BLOCK"]))](
            block,
            sink,
            exponent[span],
            None if gradient.peak is None else gradient.peak[span],
            gradient.power[span],
            None if gradient.moment is None else gradient.moment[span],
            None if gradient.floor is None else gradient.floor.contiguous()[span],
            targets.column[span],
            at_target[span],
            gradient.ignored[span],
            width,
            *block.stride(),
            *sink.stride(),
            **options,
        )
    if written is not out:
        out.copy_(written)


def _written(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel writes in place of a tensor: Triton's interpreter (3.9) cuts off bfloat16, which a GPU rounds."""
    return tensor.float() if tensor.dtype is torch.bfloat16 and not tensor.is_cuda else tensor


def _of_tokens(value: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value.contiguous() if isinstance(value, torch.Tensor) else torch.full_like(like, value)


def _compiled_for(dtype: torch.dtype, width: int) -> dict[str, Any]:
    block = min(LARGEST_BLOCK, triton.next_power_of_2(width))
    return {"BLOCK": block, "WIDE": _WIDE[dtype], "LEAST": _LEAST[dtype]}
