"""The softmax arithmetic on local columns with torch's operations: a reduction forward, the gradient backward.

Notation: see ``log2_scale``.
"""

from __future__ import annotations

import math

import torch

from rl_logprobs.softmax.log2_scale import MIN_EXPONENT, TemperatureScale, log2_weights
from rl_logprobs.softmax.partial_softmax import NO_OPTIONS, LogitGradient, PartialSoftmax, SoftmaxOptions, TargetColumns
from rl_logprobs.softmax.row_blocks import row_blocks, rows_per_workspace
from rl_logprobs.tensors import has_cpu_costs, statistics_dtype

#: The fraction of a workspace that each of two buffers takes: the extra memory of entropies stays within 2 % of large
#: logits, the extra memory of their gradients within 3 %.
TWO_BUFFERS_FORWARD, TWO_BUFFERS_BACKWARD = 9 / 16, 7 / 8


def reduce_logits(
    logits: torch.Tensor,
    targets: TargetColumns,
    scale: TemperatureScale,
    start: int,
    options: SoftmaxOptions = NO_OPTIONS,
    greater_than: torch.Tensor | None = None,
) -> PartialSoftmax:
    """Reduce local logits ``[..., width]`` to their contribution to the softmax, reading them once."""
    # ``inplace_forward`` replaces the logits by their weights relative to ``max_logit``; logits above ``greater_than``
    # are counted.
    min_logit, overwrite = options.min_logit, options.inplace_forward
    dtype, tokens, width = statistics_dtype(logits.dtype), targets.column.shape[0], logits.shape[-1]
    target_logit = target_logits(logits, targets)
    if min_logit is not None:  # the filter removes these targets
        target_logit.masked_fill_(targets.owned & (target_logit < min_logit), -math.inf)
    max_logit, sum_exp2, weighted = logits.new_zeros(3, tokens, dtype=dtype).unbind(0)
    columns, num_greater = targets.column.new_zeros(2, tokens).unbind(0)
    if width == 0:
        max_logit.fill_(-math.inf)
    rows = min(tokens, rows_per_workspace(width, logits.device, fraction=TWO_BUFFERS_FORWARD if options.entropy else 1))
    buffer = None if overwrite and logits.dtype is dtype else logits.new_empty(rows, width, dtype=dtype)
    weights = logits.new_empty(rows, width, dtype=dtype) if options.entropy else None
    for span, (block,) in row_blocks(rows, logits) if width else ():
        exponents = block if buffer is None else buffer[: len(block)]
        values = block if block.dtype is dtype else exponents.copy_(block)
        if options.argmax:
            torch.max(values, -1, out=(max_logit[span], columns[span]))
        else:
            torch.amax(values, -1, out=max_logit[span])
        if greater_than is not None:
            torch.sum(values > greater_than[span, None], -1, out=num_greater[span])
        _exponents(values, max_logit[span], scale.slice_tokens(span), _of(min_logit, span), out=exponents)
        if weights is None:
            torch.sum(exponents.exp2_(), -1, out=sum_exp2[span])
        else:
            weight = torch.exp2(exponents.clamp_(min=MIN_EXPONENT), out=weights[: len(block)])
            torch.sum(weight, -1, out=sum_exp2[span])
            torch.sum(weight.mul_(exponents), -1, out=weighted[span])
        if overwrite and exponents is not block:
            block.copy_(exponents)
    return PartialSoftmax(
        max_logit=max_logit,
        sum_exp2=sum_exp2,
        target_logit=target_logit,
        weighted_sum=weighted if options.entropy else None,
        argmax=columns + start if options.argmax else None,
        num_greater=None if greater_than is None else num_greater,
    )


def target_logits(logits: torch.Tensor, targets: TargetColumns) -> torch.Tensor:
    """Return each target's logit ``[tokens]`` in the statistics dtype, 0 for targets outside these columns."""
    dtype = statistics_dtype(logits.dtype)
    if logits.shape[-1] == 0:
        return torch.zeros_like(targets.column, dtype=dtype)
    logits_at = logits.gather(-1, targets.column.view(*logits.shape[:-1], 1)).flatten()
    return logits_at.to(dtype).where(targets.owned, 0)


def write_gradient(
    logits: torch.Tensor, targets: TargetColumns, gradient: LogitGradient, scale: TemperatureScale, out: torch.Tensor
) -> None:
    """Write the gradient of logits ``[..., width]`` to ``out``, which may be the logits themselves."""
    width, tokens = logits.shape[-1], gradient.weight.shape[0]
    if width == 0:
        return
    dtype, max_logit = statistics_dtype(logits.dtype), gradient.max_logit
    weight_coef = gradient.weight[:, None]
    weighted_coef = None if gradient.weighted is None else gradient.weighted[:, None]
    fraction = 1 if weighted_coef is None else TWO_BUFFERS_BACKWARD
    rows = min(tokens, rows_per_workspace(width, logits.device, fraction=fraction))
    buffer = None if out.dtype is dtype else logits.new_empty(rows, width, dtype=dtype)
    weights = None if weighted_coef is None else logits.new_empty(rows, width, dtype=dtype)
    columns = targets.column.reshape(tokens, -1)
    target_coef = gradient.target.where(targets.owned, 0).reshape(columns.shape)
    for span, (block, out_block) in row_blocks(rows, logits, out):
        result = out_block if buffer is None else buffer[: len(block)]
        values = block if block.dtype is dtype else result.copy_(block)
        if max_logit is None:
            torch.mul(values, weight_coef[span], out=result)
        else:
            _exponents(values, max_logit[span], scale.slice_tokens(span), _of(gradient.min_logit, span), out=result)
            if weights is None or weighted_coef is None:
                result.exp2_().mul_(weight_coef[span])
            else:
                weight = torch.exp2(result.clamp_(min=MIN_EXPONENT), out=weights[: len(block)])
                result.mul_(weighted_coef[span]).add_(weight_coef[span]).mul_(weight)
        result.scatter_add_(1, columns[span], target_coef[span])
        if result is not out_block:
            out_block.copy_(result)
    zero_tokens_(out, gradient.ignored.view(out.shape[:-1]))


def zero_tokens_(values: torch.Tensor, mask: torch.Tensor) -> None:
    """Set the rows of ``values`` ``[..., width]`` that ``mask`` ``[...]`` selects to 0, even where they are NaN."""
    if has_cpu_costs(values.device):  # indexing by nonzero() synchronises, which costs nothing on a CPU
        values[mask.nonzero(as_tuple=True)] = 0
    else:
        values.masked_fill_(mask.unsqueeze(-1), 0)


def _exponents(
    values: torch.Tensor,
    max_logit: torch.Tensor,
    scale: TemperatureScale,
    min_logit: torch.Tensor | None,
    *,
    out: torch.Tensor,
) -> None:
    """Write ``y`` of logits ``[rows, width]`` to ``out`` (which may be ``values``), ``-inf`` below ``min_logit``."""
    below = None if min_logit is None else values < min_logit[:, None]
    log2_weights(values, max_logit, scale, out=out)
    if below is not None:
        out.masked_fill_(below, -math.inf)


def _of(per_token: torch.Tensor | None, span: slice) -> torch.Tensor | None:
    return None if per_token is None else per_token[span]
