"""Softmax statistics of an LM head applied to hidden states, with one small tile of logits in memory at a time.

A tile is some tokens by some vocabulary ids, in float32.  The forward pass computes it, reduces it and drops it; the
backward pass computes it again.  Memory is bounded by the tile and does not grow with tokens times vocabulary (Wijmans
et al., "Cut Your Losses", arXiv:2411.09009), and logits that are never rounded to bfloat16 keep the accuracy that a
fused bfloat16 head loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from rl_logprobs._torch_compat import add_product_, apply_function, first_derivative, wide_product
from rl_logprobs.devices import has_cpu_costs
from rl_logprobs.dtypes import statistics_dtype, wide_dtype
from rl_logprobs.softmax.log2_scale import TemperatureScale, rescale_exponent
from rl_logprobs.softmax.partial_softmax import LogitGradient, PartialSoftmax, SoftmaxOptions, TargetColumns, merge_all
from rl_logprobs.softmax.row_blocks import tile_indices
from rl_logprobs.softmax.torch_kernels import exp2_weights_, reduce_logits, write_gradient
from rl_logprobs.softmax.vocab_parallel import SoftmaxTotals, TokenStatistics, combine_ranks, logit_gradient
from rl_logprobs.softmax.vocab_shard import VocabColumns

#: Writes the gradient of a tile's logits, given them, their tokens and columns, to a tensor that may be the logits.
TileGradient = Callable[[torch.Tensor, slice, slice, torch.Tensor], None]
Gradients = tuple[torch.Tensor | None, ...]

#: Tokens and vocabulary ids of one tile: 4 MiB of float32 on a CPU; 128 MiB on an accelerator, enough to keep its
#: matrix units busy.  On an H200 products and reductions of 4,096 x 8,192 run at 0.85 of the product's rate for
#: Llama-3's head (13.1 ms; 8,192 x 16,384 take 14.6), 0.66 for Qwen3-1.7B's (9.9; 9.6) and 0.68 for Gemma-2-2B's
#: (18.2; 17.7).
CPU_TILE = (1024, 1024)
ACCELERATOR_TILE = (4096, 8192)


def tile_size(device: torch.device, tokens: int) -> tuple[int, int]:
    """Return the tokens and vocabulary ids of one tile: more ids for fewer tokens."""
    if has_cpu_costs(device):
        return CPU_TILE
    rows, columns = ACCELERATOR_TILE
    return wider_tile(rows, columns, tokens)


def wider_tile(rows: int, columns: int, tokens: int) -> tuple[int, int]:
    """Return a tile of as many elements with at most ``tokens`` rows."""
    fewer = min(rows, tokens)
    return fewer, max(columns, rows * columns // fewer // 128 * 128)


@dataclass(frozen=True)
class LMHead:
    """The head's shard, and its map of products ``x`` to logits: ``softcap * tanh(logit_scale * x / softcap)``."""

    shard: VocabColumns
    logit_scale: float = 1.0
    softcap: float | None = None
    reduce_hidden_grad: bool = True  # the backward pass sums the hidden gradient over the ranks, else the caller


def linear_softmax_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    ignored: torch.Tensor,
    head: LMHead,
    options: SoftmaxOptions,
) -> TokenStatistics:
    """Return statistics of ``softmax(head(hidden))`` over the full vocabulary, from this rank's shard of the head."""
    # ``hidden`` is ``[tokens, features]``, the same on all ranks of the vocabulary's group, and ``weight`` ``[columns,
    # features]``.
    found = apply_function(_LinearSoftmax, hidden, weight, bias, targets, ignored, head, options)
    return TokenStatistics(*found)


def product_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the logits: the statistics dtype of the wider operand."""
    return statistics_dtype(torch.promote_types(hidden.dtype, weight.dtype))


def operand_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the products' operands: CUDA multiplies half precision into float32, a CPU does not."""
    same, device = hidden.dtype == weight.dtype, weight.device
    stands_for_cuda = device.type == "cpu" and not has_cpu_costs(device)
    cuda_products = device.type == "cuda" or stands_for_cuda
    return weight.dtype if same and cuda_products else product_dtype(hidden, weight)


@dataclass(frozen=True)
class HeadTiles:
    """The tiles of one head's logits, computed on demand in the statistics dtype."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    ignored: torch.Tensor
    head: LMHead

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return product_dtype(self.hidden, self.weight)

    @cached_property
    def operand_dtype(self) -> torch.dtype:
        """The dtype of the operands of products."""
        return operand_dtype(self.hidden, self.weight)

    @cached_property
    def operand(self) -> torch.Tensor:
        """The hidden states as an operand, unchanged for ignored tokens."""
        return self.hidden.to(self.operand_dtype)

    @property
    def size(self) -> tuple[int, int]:
        """Tokens and vocabulary ids of one tile."""
        return tile_size(self.weight.device, self.hidden.shape[0])

    def vocab_tiles(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ranges of this rank's columns, with the head's rows for them."""
        width = self.head.shard.width
        for index in tile_indices(-(-width // self.size[1])):
            start = index * self.size[1]
            cols = slice(start, min(width, start + self.size[1]))
            yield cols, self.weight[cols].to(self.operand_dtype)

    def token_tiles(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ranges of tokens, with their hidden states; 0 for ignored tokens, so that no NaN enters a product."""
        for index in tile_indices(-(-self.hidden.shape[0] // self.size[0])):
            span = slice(index * self.size[0], (index + 1) * self.size[0])
            yield span, self._rows(span)

    def _rows(self, span: slice) -> torch.Tensor:
        return self.hidden[span].to(self.operand_dtype).masked_fill(self.ignored[span, None], 0)

    def tile(self, span: slice, cols: slice) -> torch.Tensor:
        """Return the logits of some tokens and columns, a new tensor."""
        return self.logits(self._rows(span), cols, self.weight[cols].to(self.operand_dtype))

    def logits(self, rows: torch.Tensor, cols: slice, weight: torch.Tensor) -> torch.Tensor:
        """Return the logits of one tile, before the temperature."""
        tile = wide_product(rows, weight.t(), self.dtype)
        if self.bias is not None:
            tile += self.bias[cols]
        if self.head.logit_scale != 1.0:
            tile *= self.head.logit_scale
        if self.head.softcap is not None:
            tile.div_(self.head.softcap).tanh_().mul_(self.head.softcap)
        return tile

    def derivative(self, logits: torch.Tensor) -> float | torch.Tensor:
        """Return the derivative of logits by the products that they were computed from: a number or a tile."""
        scale, softcap = self.head.logit_scale, self.head.softcap
        return scale if softcap is None else (logits / softcap).square_().neg_().add_(1).mul_(scale)

    def gradients(self, needed: Sequence[bool], write: TileGradient) -> Gradients:
        """Return the gradients of hidden, weight and bias, tile by tile; hidden's is all-reduced."""
        # The weight gradient of each range of columns is summed over all tokens before it is rounded.
        hidden, weight, bias = self.hidden, self.weight, self.bias
        d_hidden = hidden.new_zeros(hidden.shape, dtype=self.dtype) if needed[0] else None
        d_weight = torch.zeros_like(weight) if needed[1] else None
        d_bias = torch.zeros_like(bias, dtype=self.dtype) if bias is not None and needed[2] else None
        for cols, tile_weight in self.vocab_tiles():
            d_tile_weight = tile_weight.new_zeros(tile_weight.shape, dtype=self.dtype)
            for span, rows in self.token_tiles():
                tile = self.logits(rows, cols, tile_weight)
                derivative = self.derivative(tile)
                write(tile, span, cols, tile)
                tile *= derivative
                operand = tile.to(tile_weight.dtype)
                if d_hidden is not None:
                    add_product_(d_hidden[span], operand, tile_weight)
                if d_weight is not None:
                    add_product_(d_tile_weight, operand.t(), rows)
                if d_bias is not None:
                    d_bias[cols] += tile.sum(0)
            if d_weight is not None:
                d_weight[cols] = d_tile_weight
        if d_bias is not None and bias is not None:
            d_bias = d_bias.to(bias.dtype)
        return self.reduced(d_hidden), d_weight, d_bias

    def reduced(self, d_hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Return the sum of the ranks' parts of the hidden gradient, if nobody else sums them, in hidden's dtype."""
        if d_hidden is None:
            return None
        if self.head.shard.group is not None and self.head.reduce_hidden_grad:
            dist.all_reduce(d_hidden, group=self.head.shard.group)
        return d_hidden.to(self.hidden.dtype)


def _reduce_tiles(
    tiles: HeadTiles,
    targets: torch.Tensor,
    scale: TemperatureScale,
    options: SoftmaxOptions,
    expected_rows: torch.Tensor | None,
) -> PartialSoftmax:
    """Reduce all tiles to this rank's contribution to the softmax."""
    # ``expected_rows``, ``[tokens, features]`` of zeros, is overwritten by the sum of ``2**y`` times the head's rows
    # (times the logits' derivative). The hidden gradient needs nothing more, so that a frozen head costs no product
    # backward.
    shard, tokens = tiles.head.shard, targets.shape[0]
    empty = reduce_logits(
        tiles.hidden.new_empty(tokens, 0, dtype=tiles.dtype),
        TargetColumns.locate(targets, tiles.ignored, 0, 0),
        scale,
        shard.start,
        options,
    )
    running = empty.stack().to(wide_dtype(targets.device))
    for cols, weight in tiles.vocab_tiles():
        start = shard.start + cols.start
        columns = TargetColumns.locate(targets, tiles.ignored, start, weight.shape[0])
        for span, rows in tiles.token_tiles():
            logits, tile_scale = tiles.logits(rows, cols, weight), scale.slice_tokens(span)
            found = reduce_logits(logits, columns.slice_tokens(span), tile_scale, start, options)
            before = empty.unstack(running[:, span])
            after = merge_all([before, found.to(running.dtype)], tile_scale)
            if expected_rows is not None:
                derivative = tiles.derivative(logits)
                exp2_weights_(logits, found.max_logit, tile_scale)
                old_factor = rescale_exponent(before.max_logit, after.max_logit, tile_scale).exp2()[:, None]
                new_factor = rescale_exponent(found.max_logit, after.max_logit, tile_scale).exp2()[:, None]
                expected_rows[span] *= old_factor
                logits *= new_factor.to(logits.dtype) * derivative
                add_product_(expected_rows[span], logits.to(weight.dtype), weight)
            running[:, span] = after.stack()
    return empty.unstack(running).to(tiles.dtype)


class _LinearSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        ignored: torch.Tensor,
        head: LMHead,
        options: SoftmaxOptions,
    ) -> TokenStatistics:
        tiles = HeadTiles(hidden, weight, bias, ignored, head)
        scale = TemperatureScale.of(options.temperature, tiles.dtype)
        d_hidden, d_weight, d_bias, *_ = ctx.needs_input_grad
        frozen = d_hidden and not (d_weight or d_bias or options.entropy)
        expected_rows = hidden.new_zeros(hidden.shape, dtype=tiles.dtype) if frozen else None
        local = _reduce_tiles(tiles, targets, scale, options, expected_rows)
        statistics, totals = combine_ranks(local, ignored, scale, head.shard.group)
        target_logit = None
        if expected_rows is not None:
            expected_rows *= rescale_exponent(local.max_logit, totals.max_logit, scale).exp2()[:, None]
            target_logit = local.target_logit
        ctx.save_for_backward(hidden, weight, bias, targets, ignored, expected_rows, target_logit, *totals)
        ctx.head, ctx.scale = head, scale
        ctx.set_materialize_grads(False)
        if statistics.argmax is not None:
            ctx.mark_non_differentiable(statistics.argmax)
        return statistics

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, ignored, expected_rows, target_logit, *totals = ctx.saved_tensors
        tiles = HeadTiles(hidden, weight, bias, ignored, ctx.head)
        gradient = logit_gradient(SoftmaxTotals(*totals), ignored, ctx.scale, gradients)
        if expected_rows is None:
            write = _write_tiles(tiles, targets, gradient, ctx.scale)
            found = tiles.gradients(ctx.needs_input_grad[:3], write)
        else:
            d_hidden = _frozen_head_gradient(tiles, targets, gradient, expected_rows, target_logit)
            found = tiles.reduced(d_hidden), None, None
        return *found, None, None, None, None


def _frozen_head_gradient(
    tiles: HeadTiles,
    targets: torch.Tensor,
    gradient: LogitGradient,
    expected_rows: torch.Tensor,
    target_logit: torch.Tensor,
) -> torch.Tensor:
    """Return the hidden gradient from the expected rows of the head and the row of each target."""
    shard = tiles.head.shard
    columns = TargetColumns.locate(targets, tiles.ignored, shard.start, shard.width)
    d_hidden = expected_rows * gradient.weight[:, None]
    if shard.width:
        target_coef = (gradient.target * tiles.derivative(target_logit)).where(columns.owned, 0)
        d_hidden += tiles.weight[columns.column].to(tiles.dtype).mul_(target_coef[:, None])
    return d_hidden.masked_fill_(gradient.ignored[:, None], 0)


def _write_tiles(
    tiles: HeadTiles, targets: torch.Tensor, gradient: LogitGradient, scale: TemperatureScale
) -> TileGradient:
    """Return the function that writes the gradient of one tile of logits."""

    def write(tile: torch.Tensor, span: slice, cols: slice, out: torch.Tensor) -> None:
        start = tiles.head.shard.start + cols.start
        columns = TargetColumns.locate(targets[span], tiles.ignored[span], start, tile.shape[1])
        write_gradient(tile, columns, gradient.slice_tokens(span), scale.slice_tokens(span), out=out)

    return write
