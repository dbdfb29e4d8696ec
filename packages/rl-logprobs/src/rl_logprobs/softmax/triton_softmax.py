"""Statistics of logits by Triton kernels: two launches and one collective forward, two launches backward.

``reduce_kernel`` reads the logits once, and ``finish_kernel`` combines the ranks.  ``coefficient_kernel`` turns the
gradients of statistics to factors of a token, and ``gradient_kernel`` writes the gradient of the logits.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_logprobs._torch_compat import apply_function, assert_on_device, first_derivative
from rl_logprobs.dtypes import statistics_dtype
from rl_logprobs.softmax.backends import kernels_check
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions, TargetColumns
from rl_logprobs.softmax.torch_kernels import target_logits
from rl_logprobs.softmax.triton_backend import (
    KERNELS,
    TOKENS,
    blocks,
    kernel_output,
    launch,
    note_write,
    per_token,
    reduce_rows,
    temperatures_of,
    write_rows,
)
from rl_logprobs.softmax.vocab_parallel import TokenStatistics, all_gather
from rl_logprobs.softmax.vocab_shard import VocabColumns


def triton_statistics(
    logits: torch.Tensor, ids: torch.Tensor, ignore_index: int, shard: VocabColumns, options: SoftmaxOptions
) -> TokenStatistics:
    """Return statistics of the full softmax, of the shape of ``ids``, from this rank's columns of any strides."""
    # The ids are checked on the device. Tokens with ``ignore_index`` get 0 and no gradient, whatever their logits.
    found = apply_function(_TritonSoftmax, logits, ids.contiguous(), ignore_index, shard, options)
    return TokenStatistics(*found)


def fields(options: SoftmaxOptions) -> int:
    """Return the number of sums of a token."""
    return 3 + options.entropy + options.argmax + options.target_rank


def valid_ids(device: torch.device) -> torch.Tensor:
    """Return the number that a kernel sets to 0 where a target is neither an id nor the ignored one."""
    return torch.ones((), dtype=torch.int32, device=device)


def check_ids(valid: torch.Tensor, vocab_size: int, ignore_index: int) -> None:
    """Fail on the device if a kernel has found a wrong target."""
    if kernels_check(valid.device):
        assert_on_device(valid, f"a target is outside [0, {vocab_size}) and is not {ignore_index}")


def finish(
    state: torch.Tensor,
    ids: torch.Tensor,
    ignore_index: int,
    shard: VocabColumns,
    options: SoftmaxOptions,
    temperatures: dict[str, Any],
    dtype: torch.dtype,
) -> tuple[TokenStatistics, torch.Tensor]:
    """Exchange the ranks' sums in one collective, and return the statistics and totals ``[3 or 4, tokens]``."""
    gathered = state if shard.group is None else all_gather(state, shard.group)
    tokens = ids.numel()

    def empty(kind: torch.dtype) -> torch.Tensor:
        return torch.empty(ids.shape, dtype=kind, device=ids.device)

    logprobs, logsumexps, entropies = empty(dtype), empty(dtype), empty(dtype) if options.entropy else None
    argmaxes, ranks_of_target = (
        empty(torch.int64) if asked else None for asked in (options.argmax, options.target_rank)
    )
    totals = torch.empty(3 + options.entropy, tokens, dtype=torch.float64, device=ids.device)
    launch(
        KERNELS,
        "finish_kernel",
        (blocks(tokens, TOKENS),),
        ids.device,
        gathered=gathered,
        targets=ids,
        logprobs=logprobs,
        logsumexps=logsumexps,
        entropies=entropies,
        argmaxes=argmaxes,
        ranks_of_target=ranks_of_target,
        totals=totals,
        tokens=tokens,
        ignore_index=ignore_index,
        ranks=gathered.shape[0] if gathered is not state else 1,
        ENTROPY=options.entropy,
        ARGMAX=options.argmax,
        RANK=options.target_rank,
        BLOCK=TOKENS,
        WIDE=dtype,
        **temperatures,
    )
    return TokenStatistics(logprobs, logsumexps, entropies, argmaxes, ranks_of_target), totals


def coefficients(
    totals: torch.Tensor,
    ids: torch.Tensor,
    ignore_index: int,
    gradients: tuple[torch.Tensor | None, ...],
    temperatures: dict[str, Any],
    dtype: torch.dtype,
    local_max: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``[3, tokens]``, the factors of the logits' gradient; for logits overwritten relative to ``local_max``."""
    tokens = ids.numel()
    found = torch.empty(3, tokens, dtype=dtype, device=ids.device)
    (d_logprobs, by_token), (d_logsumexps, by_sum), (d_entropies, by_entropy) = map(per_token, gradients[:3])
    launch(
        KERNELS,
        "coefficient_kernel",
        (blocks(tokens, TOKENS),),
        ids.device,
        totals=totals,
        targets=ids,
        local_max=local_max,
        d_logprobs=d_logprobs,
        d_logsumexps=d_logsumexps,
        d_entropies=d_entropies,
        coefficients=found,
        logprob_stride=by_token,
        logsumexp_stride=by_sum,
        entropy_stride=by_entropy,
        tokens=tokens,
        ignore_index=ignore_index,
        BLOCK=TOKENS,
        WIDE=dtype,
        **temperatures,
    )
    return found


class _TritonSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        ids: torch.Tensor,
        ignore_index: int,
        shard: VocabColumns,
        options: SoftmaxOptions,
    ) -> TokenStatistics:
        dtype, temperatures = statistics_dtype(logits.dtype), temperatures_of(options.temperature, logits.device)
        state = torch.empty(fields(options), ids.numel(), dtype=torch.float64, device=logits.device)
        valid = valid_ids(logits.device)
        greater_than = None
        if options.target_rank and shard.group is not None:  # one rank holds the target's logit
            columns = TargetColumns.locate(ids.view(-1), ids.view(-1) == ignore_index, shard.start, shard.width)
            found = target_logits(logits[..., : shard.width], columns)
            greater_than = all_gather(found[None], shard.group).sum(0)[0]
        overwritten = kernel_output(logits) if options.inplace_forward else logits
        given = {
            "greater_than": greater_than,
            "valid": valid,
            "width": shard.width,
            "start": shard.start,
            "vocab_size": shard.vocab_size,
            "ignore_index": ignore_index,
            **temperatures,
        }
        reduce_rows(overwritten, ids, state, options, dtype, given)
        if overwritten is not logits:
            logits.copy_(overwritten)
        if options.inplace_forward:
            note_write(logits)
        check_ids(valid, shard.vocab_size, ignore_index)
        statistics, totals = finish(state, ids, ignore_index, shard, options, temperatures, dtype)
        # Autograd refuses to return a saved input that is a view made by another function and has been overwritten.
        saved_logits = logits.detach() if options.inplace_forward else logits
        local = state if options.inplace_forward else None
        ctx.save_for_backward(saved_logits, ids, options.min_logit, local, totals)
        ctx.ignore_index, ctx.shard, ctx.temperatures = ignore_index, shard, temperatures
        ctx.inplace = options.inplace_backward or options.inplace_forward
        ctx.set_materialize_grads(False)
        integers = (statistics.argmax, statistics.target_rank)
        ctx.mark_non_differentiable(*(value for value in integers if value is not None))
        return statistics

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, ids, min_logit, local, totals = ctx.saved_tensors
        dtype = statistics_dtype(logits.dtype)
        factors = coefficients(totals, ids, ctx.ignore_index, gradients, ctx.temperatures, dtype, local)
        out = logits if ctx.inplace else logits.new_empty(logits.shape)
        written = kernel_output(out)
        given = {
            "min_logits": min_logit if local is None else None,
            "totals": totals if local is None else None,
            "coefficients": factors,
            "width": ctx.shard.width,
            "start": ctx.shard.start,
            "ignore_index": ctx.ignore_index,
            "ENTROPY": gradients[2] is not None,
            **ctx.temperatures,
        }
        write_rows(logits, written, ids, dtype, given)
        if written is not out:
            out.copy_(written)
        if ctx.inplace:
            note_write(out)
        return out, None, None, None, None
