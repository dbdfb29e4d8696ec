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
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from rl_logprobs._torch_compat import add_product_, wide_product
from rl_logprobs.softmax.log2_scale import TemperatureScale, log2_weights, rescale_exponent
from rl_logprobs.softmax.partial_softmax import PartialSoftmax, SoftmaxOptions, TargetColumns, merge
from rl_logprobs.softmax.row_blocks import tile_indices
from rl_logprobs.softmax.torch_kernels import reduce_logits, write_gradient
from rl_logprobs.softmax.vocab_parallel import (
    Gradients,
    SoftmaxTotals,
    TokenStatistics,
    combine_ranks,
    logit_gradient,
)
from rl_logprobs.softmax.vocab_shard import VocabColumns
from rl_logprobs.tensors import has_cpu_costs, statistics_dtype, wide_dtype

#: Writes the gradient of a tile's logits, given them, their tokens and columns, to a tensor that may be the logits.
TileGradient = Callable[[torch.Tensor, slice, slice, torch.Tensor], None]

#: Tokens and vocabulary ids of one tile: 4 MiB of float32 on a CPU; 128 MiB on an accelerator, enough to keep its
#: matrix units busy.  On an H200 products and reductions of 4,096 x 8,192 run at 0.85 of the product's rate for
#: Llama-3's head (13.1 ms; 8,192 x 16,384 take 14.6), 0.66 for Qwen3-1.7B's (9.9; 9.6) and 0.68 for Gemma-2-2B's
#: (18.2; 17.7).
CPU_TILE = (1024, 1024)
ACCELERATOR_TILE = (4096, 8192)


def tile_size(device: torch.device, tokens: int) -> tuple[int, int]:
    """Return the tokens and vocabulary ids of one tile: more ids for fewer tokens."""
    return CPU_TILE if has_cpu_costs(device) else accelerator_tile(tokens)


def accelerator_tile(tokens: int) -> tuple[int, int]:
    """Return a tile of as many elements as ``ACCELERATOR_TILE`` with at most ``tokens`` rows."""
    rows, columns = ACCELERATOR_TILE
    fewer = min(rows, tokens)
    return fewer, max(columns, rows * columns // fewer // 128 * 128)


@dataclass(frozen=True)
class LMHead:
    """The head's shard, and its map of products ``x`` to logits: ``softcap * tanh(logit_scale * x / softcap)``."""

    shard: VocabColumns
    logit_scale: float = 1.0
    softcap: float | None = None
    reduce_hidden_grad: bool = True  # the backward pass sums the hidden gradient over the ranks, else the caller


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

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Tokens and vocabulary ids of one tile."""
        return tile_size(self.weight.device, self.hidden.shape[0])

    def vocab_tiles(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ranges of this rank's columns, with the head's rows for them; one empty range without columns."""
        width = self.head.shard.width
        for index in tile_indices(max(1, -(-width // self.tile_shape[1]))):
            start = index * self.tile_shape[1]
            cols = slice(start, min(width, start + self.tile_shape[1]))
            yield cols, self.weight[cols].to(self.operand_dtype)

    def token_tiles(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ranges of tokens, with their hidden states."""
        for index in tile_indices(-(-self.hidden.shape[0] // self.tile_shape[0])):
            span = slice(index * self.tile_shape[0], (index + 1) * self.tile_shape[0])
            yield span, self.rows(span)

    def rows(self, span: slice) -> torch.Tensor:
        """Return the hidden states of some tokens; 0 for ignored tokens, so that no NaN enters a product."""
        return self.hidden[span].to(self.operand_dtype).masked_fill(self.ignored[span, None], 0)

    def tile(self, span: slice, cols: slice) -> torch.Tensor:
        """Return the logits of some tokens and columns, a new tensor."""
        return self.logits(self.rows(span), cols, self.weight[cols].to(self.operand_dtype))

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
        d_weight = torch.empty_like(weight) if needed[1] else None
        d_bias, parts = None, -(-hidden.shape[0] // self.tile_shape[0])
        if bias is not None and needed[2]:
            d_bias = torch.zeros(parts, bias.shape[0], dtype=self.dtype, device=bias.device)
        if d_weight is not None:
            d_weight[self.head.shard.width :].zero_()
        for cols, part in self.vocab_tiles():
            total = None
            for span, rows in self.token_tiles():
                gradient = self.tile_gradient(rows, part, span, cols, write)
                if d_hidden is not None:
                    add_product_(d_hidden[span], gradient, part)
                if d_weight is not None and parts == 1 and d_weight.dtype is gradient.dtype:
                    torch.mm(gradient.t(), rows, out=d_weight[cols])
                elif d_weight is not None and total is None:
                    total = wide_product(gradient.t(), rows, self.dtype)
                elif total is not None:
                    add_product_(total, gradient.t(), rows)
                if d_bias is not None:
                    torch.sum(gradient, 0, dtype=self.dtype, out=d_bias[span.start // self.tile_shape[0], cols])
                del gradient  # before the next tile is allocated
            if d_weight is not None and total is not None:
                d_weight[cols] = total
        if d_bias is not None and bias is not None:
            d_bias = d_bias.sum(0).to(bias.dtype)
        return self.reduced(d_hidden), d_weight, d_bias

    def tile_gradient(
        self, rows: torch.Tensor, weight: torch.Tensor, span: slice, cols: slice, write: TileGradient
    ) -> torch.Tensor:
        """Return the gradient of a tile's products in the dtype of the operands."""
        tile = self.logits(rows, cols, weight)
        derivative = self.derivative(tile)
        write(tile, span, cols, tile)
        tile *= derivative
        return tile.to(weight.dtype)

    def reduced(self, d_hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Return the hidden gradient in hidden's dtype, summed over the ranks unless the caller sums it."""
        if d_hidden is None:
            return None
        if self.head.shard.group is not None and self.head.reduce_hidden_grad:
            dist.all_reduce(d_hidden, group=self.head.shard.group)
        return d_hidden.to(self.hidden.dtype)


@dataclass(frozen=True)
class HeadReducer:
    """Statistics of ``softmax(head(hidden))`` over the full vocabulary, from this rank's shard of the head."""

    # ``hidden`` is ``[tokens, features]``, the same on all ranks of the vocabulary's group, and ``weight`` ``[columns,
    # features]``. ``expected_rows``, ``[tokens, features]``, becomes the sum of ``2**y`` times the head's rows (times
    # the logits' derivative). The hidden gradient of a frozen head needs nothing more: no product backward.
    head: LMHead
    ignore_index: int
    options: SoftmaxOptions
    dtype: torch.dtype  # of the logits
    tiles: ClassVar[type[HeadTiles]] = HeadTiles

    @cached_property
    def scale(self) -> TemperatureScale:
        """The scale of the temperature."""
        return TemperatureScale.of(self.options.temperature, self.dtype)

    def statistics(
        self, tensors: tuple[Any, ...], needed: Sequence[bool]
    ) -> tuple[TokenStatistics, Sequence[torch.Tensor | None]]:
        """Return the statistics of hidden, weight, bias and ids, with the tensors to save."""
        hidden, weight, bias, ids = tensors
        tiles = self.tiles(hidden, weight, bias, ids.view(-1) == self.ignore_index, self.head)
        frozen = needed[0] and not (needed[1] or needed[2] or self.options.entropy)
        expected_rows = hidden.new_zeros(hidden.shape, dtype=self.dtype) if frozen else None
        statistics, local, totals = self.reduce(tiles, ids, expected_rows)
        return statistics, (*tensors, expected_rows, local if frozen else None, *totals)

    def gradients(self, saved: Sequence[Any], needed: Sequence[bool], gradients: Gradients) -> Gradients:
        """Return the gradients of hidden, weight and bias."""
        hidden, weight, bias, ids, expected_rows, local, *totals = saved
        tiles = self.tiles(hidden, weight, bias, ids.view(-1) == self.ignore_index, self.head)
        if expected_rows is None:
            return *tiles.gradients(needed, self.writer(tiles, ids, totals, gradients)), None
        shard = self.head.shard
        columns = TargetColumns.locate(ids.view(-1), tiles.ignored, shard.start, shard.width)
        weight_coef, target_coef, target_logit = self.frozen_coefficients(tiles, ids, local, totals, gradients)
        d_hidden = expected_rows * weight_coef[:, None]
        if shard.width:
            target_coef = (target_coef * tiles.derivative(target_logit)).where(columns.owned, 0)
            d_hidden += weight[columns.column].to(self.dtype).mul_(target_coef[:, None])
        return tiles.reduced(d_hidden.masked_fill_(tiles.ignored[:, None], 0)), None, None, None

    def reduce(
        self, tiles: HeadTiles, ids: torch.Tensor, expected_rows: torch.Tensor | None
    ) -> tuple[TokenStatistics, torch.Tensor, Sequence[torch.Tensor | None]]:
        """Return the statistics, values of this rank's columns for a frozen head, and totals of all ranks."""
        local = self._reduce_tiles(tiles, ids.view(-1), expected_rows)
        statistics, totals = combine_ranks(local, tiles.ignored, self.scale, self.head.shard.group)
        if expected_rows is not None:
            expected_rows *= rescale_exponent(local.max_logit, totals.max_logit, self.scale).exp2()[:, None]
        return statistics, local.target_logit, totals

    def _reduce_tiles(
        self, tiles: HeadTiles, targets: torch.Tensor, expected_rows: torch.Tensor | None
    ) -> PartialSoftmax:
        start, no_logits = self.head.shard.start, tiles.hidden.new_empty(targets.shape[0], 0, dtype=tiles.dtype)
        no_columns = TargetColumns.locate(targets, tiles.ignored, 0, 0)
        empty = reduce_logits(no_logits, no_columns, self.scale, start, self.options)
        running = empty.stack().to(wide_dtype(targets.device))
        for cols, weight in tiles.vocab_tiles():
            first = start + cols.start
            columns = TargetColumns.locate(targets, tiles.ignored, first, weight.shape[0])
            for span, rows in tiles.token_tiles():
                logits, scale = tiles.logits(rows, cols, weight), self.scale.slice_tokens(span)
                tile = reduce_logits(logits, columns.slice_tokens(span), scale, first, self.options)
                before = empty.unstack(running[:, span])
                after = merge(empty.unstack(torch.stack([running[:, span], tile.stack().to(running.dtype)])), scale)
                if expected_rows is not None:
                    derivative = tiles.derivative(logits)
                    log2_weights(logits, tile.max_logit, scale, out=logits).exp2_()
                    old_factor = rescale_exponent(before.max_logit, after.max_logit, scale).exp2()[:, None]
                    new_factor = rescale_exponent(tile.max_logit, after.max_logit, scale).exp2()[:, None]
                    expected_rows[span] *= old_factor
                    logits *= new_factor.to(logits.dtype) * derivative
                    add_product_(expected_rows[span], logits.to(weight.dtype), weight)
                running[:, span] = after.stack()
        return empty.unstack(running).to(tiles.dtype)

    def frozen_coefficients(
        self, tiles: HeadTiles, ids: torch.Tensor, local: torch.Tensor, totals: Sequence[Any], gradients: Gradients
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the coefficients of the expected rows and of the targets' rows, and the targets' logits."""
        gradient = logit_gradient(SoftmaxTotals(*totals), tiles.ignored, self.scale, gradients)
        return gradient.weight, gradient.target, local

    def writer(self, tiles: HeadTiles, ids: torch.Tensor, totals: Sequence[Any], gradients: Gradients) -> TileGradient:
        """Return the function that writes the gradient of one tile of logits."""
        gradient = logit_gradient(SoftmaxTotals(*totals), tiles.ignored, self.scale, gradients)
        targets = ids.view(-1)

        def write(tile: torch.Tensor, span: slice, cols: slice, out: torch.Tensor) -> None:
            start = self.head.shard.start + cols.start
            columns = TargetColumns.locate(targets[span], tiles.ignored[span], start, tile.shape[1])
            write_gradient(tile, columns, gradient.slice_tokens(span), self.scale.slice_tokens(span), out=out)

        return write
