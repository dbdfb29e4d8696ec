"""``reduce_logits`` and ``write_gradient`` as Triton kernels: half-precision logits are read once, in no workspace.

One program reduces one row, with a running maximum and sum for each of its lanes, which are combined at the end of the
row.  In the backward pass one program writes one block of a row.  Imported only where Triton is asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from rl_logprobs.dtypes import statistics_dtype
from rl_logprobs.softmax.log2_scale import TemperatureScale
from rl_logprobs.softmax.partial_softmax import NO_OPTIONS, LogitGradient, PartialSoftmax, SoftmaxOptions, TargetColumns
from rl_logprobs.softmax.row_blocks import row_blocks
from rl_logprobs.softmax.torch_kernels import mask_targets_below, target_logits
from rl_logprobs.softmax.triton_kernels import gradient_kernel, reduce_kernel

#: The most columns that a program processes at once.
LARGEST_BLOCK = 2048
#: Columns a thread.  With 8 no variant that trains a policy spills registers on sm_80, sm_90, sm_100 and gfx942; with
#: 32 the one with all statistics spilled 700 bytes (``benchmarks/kernel_resources.py`` compiles each for each target).
COLUMNS_PER_THREAD = 8
#: Threads of a warp: of AMD's accelerators 64.
WARP_SIZE = 64 if torch.version.hip else 32

_LEAST = {torch.float32: torch.finfo(torch.float32).min, torch.float64: torch.finfo(torch.float64).min}
_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


def reduce_logits(
    logits: torch.Tensor,
    targets: TargetColumns,
    scale: TemperatureScale,
    start: int,
    options: SoftmaxOptions = NO_OPTIONS,
    greater_than: torch.Tensor | None = None,
) -> PartialSoftmax:
    """Reduce local logits as ``torch_kernels.reduce_logits`` does, with the same arguments."""
    min_logit = options.min_logit
    dtype, tokens, width = statistics_dtype(logits.dtype), targets.column.shape[0], logits.shape[-1]
    target_logit = target_logits(logits, targets)
    max_logit = logits.new_full((tokens,), -math.inf, dtype=dtype)
    sum_exp2, weighted = logits.new_zeros(2, tokens, dtype=dtype).unbind(0)
    columns, num_greater = targets.column.new_zeros(2, tokens).unbind(0)
    factor = _per_token(scale.log2_factor, sum_exp2)
    target = _kernel_output(logits) if options.inplace_forward else logits
    for span, (block,) in row_blocks(tokens, target) if width else ():
        reduce_kernel[(len(block),)](
            block,
            factor[span],
            None if greater_than is None else greater_than.contiguous()[span],
            None if min_logit is None else min_logit.contiguous()[span],
            max_logit[span],
            sum_exp2[span],
            weighted[span],
            columns[span],
            num_greater[span],
            width,
            *block.stride(),
            WEIGHTED_SUM=options.entropy,
            ARGMAX=options.argmax,
            OVERWRITE=options.inplace_forward,
            STAGES=stages(),
            **launch_options(dtype, width),
        )
    if target is not logits:
        logits.copy_(target)
    return PartialSoftmax(
        max_logit=max_logit,
        sum_exp2=sum_exp2,
        target_logit=mask_targets_below(target_logit, targets, min_logit),
        weighted_sum=weighted if options.entropy else None,
        argmax=columns + start if options.argmax else None,
        num_greater=None if greater_than is None else num_greater,
    )


def write_gradient(
    logits: torch.Tensor, targets: TargetColumns, gradient: LogitGradient, scale: TemperatureScale, out: torch.Tensor
) -> None:
    """Write the gradient as ``torch_kernels.write_gradient`` does, for one target per token."""
    width, tokens = logits.shape[-1], gradient.weight.shape[0]
    if width == 0:
        return
    factor = _per_token(scale.log2_factor, gradient.weight)
    constants = launch_options(statistics_dtype(logits.dtype), width)
    target_coef = gradient.target.where(targets.owned, 0)
    result = _kernel_output(out)
    for span, (block, out_block) in row_blocks(tokens, logits, result):
        gradient_kernel[(len(block), triton.cdiv(width, constants["BLOCK"]))](
            block,
            out_block,
            factor[span],
            None if gradient.max_logit is None else gradient.max_logit[span],
            gradient.weight[span],
            None if gradient.weighted is None else gradient.weighted[span],
            None if gradient.min_logit is None else gradient.min_logit.contiguous()[span],
            targets.column[span],
            target_coef[span],
            gradient.ignored[span],
            width,
            *block.stride(),
            *out_block.stride(),
            **constants,
        )
    if result is not out:
        out.copy_(result)


def _kernel_output(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a kernel writes: a float32 copy of bfloat16 in Triton's interpreter."""
    # The interpreter (Triton 3.9) truncates to bfloat16 where a GPU rounds; no upstream issue found.
    return tensor.float() if tensor.dtype is torch.bfloat16 and not tensor.is_cuda else tensor


def _per_token(value: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value.contiguous() if isinstance(value, torch.Tensor) else torch.full_like(like, value)


def launch_options(dtype: torch.dtype, width: int, warp_size: int = WARP_SIZE) -> dict[str, Any]:
    """Return the block, the warps and the dtype of a kernel's statistics, for rows of ``width`` columns."""
    block = min(LARGEST_BLOCK, triton.next_power_of_2(width))
    warps = max(1, block // (COLUMNS_PER_THREAD * warp_size))
    return {"BLOCK": block, "WIDE": _WIDE[dtype], "LEAST": _LEAST[dtype], "num_warps": warps}


def stages(warp_size: int = WARP_SIZE) -> int:
    """Return how many blocks of a row are processed or on their way (see ``triton.language.range``)."""
    # NVIDIA's GPUs copy ahead into shared memory. For gfx942 Triton loads ahead into registers, which then spill.
    return 4 if warp_size == 32 else 1
