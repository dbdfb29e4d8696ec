"""Softmax statistics straight from hidden states: the head's logits exist one small tile at a time.

A tile is some tokens by some vocabulary ids, in float32, computed forward, reduced to sums and forgotten; the
backward pass computes it again.  Bounded by the tile, memory does not grow with tokens times vocabulary
(Wijmans et al., "Cut Your Losses", arXiv:2411.09009), and logits that never pass through bfloat16 keep the
accuracy that a fused bfloat16 head loses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_logprobs._torch_compat import add_product_, apply_function, wide_product
from rl_logprobs.layout import VocabShard
from rl_logprobs.powers import Scale, peak_lag
from rl_logprobs.rows import statistics_dtype, wide_dtype
from rl_logprobs.softmax import (
    LogitGradient,
    Sums,
    TargetColumns,
    column_sums,
    merge_all,
    write_gradient,
    write_weights,
)
from rl_logprobs.vocab_parallel import Finished, SoftmaxOptions, SoftmaxStatistics, finish, logit_gradient

#: Tokens and vocabulary ids of one tile.  On a CPU 4 MiB of float32; on an accelerator 128 MiB, enough to keep
#: its matrix units busy.
CPU_TILE = (1024, 1024)
ACCELERATOR_TILE = (4096, 8192)


@dataclass(frozen=True)
class Head:
    """The head's vocabulary and what it does to its products: ``softcap * tanh(logit_scale * x / softcap)``.

    ``sum_hidden`` says that this function adds up the hidden gradient over the vocabulary's ranks; else the
    caller does.
    """

    shard: VocabShard
    logit_scale: float = 1.0
    softcap: float | None = None
    sum_hidden: bool = True


def head_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    ignored: torch.Tensor,
    head: Head,
    options: SoftmaxOptions,
) -> SoftmaxStatistics:
    """Statistics of ``softmax(head(hidden))`` over the whole vocabulary, from this rank's part of the head.

    Args:
        hidden: ``[tokens, features]``, the same on all ranks of the vocabulary's group.
        weight: ``[columns, features]``, this rank's rows of the head.
        bias: ``[columns]`` or None.
        targets: ``[tokens]`` vocabulary ids.
        ignored: ``[tokens]`` bool; those tokens get zeros and send no gradient, whatever their hidden state.
        head: how logits come from products.
        options: what to compute; ``inplace_backward`` has no meaning here.
    """
    found = apply_function(_FromHidden, hidden, weight, bias, targets, ignored, head, options)
    return SoftmaxStatistics(*found)


@dataclass(frozen=True)
class _Tiles:
    """The tiles of one head, computed on demand in the statistics dtype."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    ignored: torch.Tensor
    head: Head

    @property
    def dtype(self) -> torch.dtype:
        return statistics_dtype(torch.promote_types(self.hidden.dtype, self.weight.dtype))

    @property
    def operand_dtype(self) -> torch.dtype:
        """What the products take: an accelerator multiplies half precision into float32, a CPU does not."""
        same = self.hidden.dtype == self.weight.dtype
        return self.weight.dtype if same and self.weight.device.type == "cuda" else self.dtype

    @property
    def _size(self) -> tuple[int, int]:
        return CPU_TILE if self.weight.device.type == "cpu" else ACCELERATOR_TILE

    def vocabulary(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Stretches of this rank's columns and the head's rows for them."""
        width = self.head.shard.width
        for start in range(0, width, self._size[1]):
            stretch = slice(start, min(width, start + self._size[1]))
            yield stretch, self.weight[stretch].to(self.operand_dtype)

    def tokens(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Stretches of tokens and their hidden states; zero where ignored, as NaN would spread by products."""
        for start in range(0, self.hidden.shape[0], self._size[0]):
            span = slice(start, start + self._size[0])
            rows = self.hidden[span].to(self.operand_dtype)
            yield span, rows.masked_fill(self.ignored[span, None], 0)

    def logits(self, rows: torch.Tensor, stretch: slice, part: torch.Tensor) -> torch.Tensor:
        """The tile's logits, without the temperature."""
        tile = wide_product(rows, part.t(), self.dtype)
        if self.bias is not None:
            tile += self.bias[stretch]
        if self.head.logit_scale != 1.0:
            tile *= self.head.logit_scale
        if self.head.softcap is not None:
            tile.div_(self.head.softcap).tanh_().mul_(self.head.softcap)
        return tile

    def slope(self, logits: torch.Tensor) -> float | torch.Tensor:
        """The derivative of logits by the products that they came from; 1 or a tile."""
        scale, softcap = self.head.logit_scale, self.head.softcap
        return scale if softcap is None else (logits / softcap).square_().neg_().add_(1).mul_(scale)


def _sum_tiles(
    tiles: _Tiles, targets: torch.Tensor, scale: Scale, options: SoftmaxOptions, expected: torch.Tensor | None
) -> Sums:
    """This rank's sums over all its tiles.

    ``expected``, ``[tokens, features]`` of zeros, becomes the sum of ``2**y`` times the head's rows (times the
    logit's slope): all that the hidden gradient needs, so that a frozen head costs no product backward.
    """
    shard, tokens = tiles.head.shard, targets.shape[0]
    nothing = column_sums(
        tiles.hidden.new_empty(tokens, 0, dtype=tiles.dtype),
        TargetColumns.among(targets, tiles.ignored, 0, 0),
        scale,
        shard.start,
        moment=options.entropy,
        best=options.argmax,
    )
    running = nothing.stack().to(wide_dtype(targets.device))
    for stretch, part in tiles.vocabulary():
        start = shard.start + stretch.start
        places = TargetColumns.among(targets, tiles.ignored, start, part.shape[0])
        for span, rows in tiles.tokens():
            logits, here = tiles.logits(rows, stretch, part), scale.rows(span)
            found = column_sums(logits, places.rows(span), here, start, moment=options.entropy, best=options.argmax)
            before = nothing.unstack(running[:, span])
            after = merge_all([before, found.to(running.dtype)], here)
            if expected is not None:
                slope = tiles.slope(logits)
                write_weights(logits, found.peak, here)
                expected[span] *= peak_lag(before.peak, after.peak, here).exp2()[:, None]
                logits *= peak_lag(found.peak, after.peak, here).exp2()[:, None].to(logits.dtype) * slope
                add_product_(expected[span], logits.to(part.dtype), part)
            running[:, span] = after.stack()
    return nothing.unstack(running).to(tiles.dtype)


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        ignored: torch.Tensor,
        head: Head,
        options: SoftmaxOptions,
    ) -> SoftmaxStatistics:
        tiles = _Tiles(hidden, weight, bias, ignored, head)
        scale = Scale.of(options.temperature, tiles.dtype)
        d_hidden, d_weight, d_bias, *_ = ctx.needs_input_grad
        frozen = d_hidden and not (d_weight or d_bias or options.entropy)
        expected = hidden.new_zeros(hidden.shape, dtype=tiles.dtype) if frozen else None
        local = _sum_tiles(tiles, targets, scale, options, expected)
        statistics, finished = finish(local, ignored, scale, head.shard.group)
        target = None
        if expected is not None:
            expected *= peak_lag(local.peak, finished.peak, scale).exp2()[:, None]
            target = local.target
        ctx.save_for_backward(hidden, weight, bias, targets, ignored, expected, target, *finished)
        ctx.head, ctx.scale = head, scale
        ctx.set_materialize_grads(False)
        if statistics.argmax is not None:
            ctx.mark_non_differentiable(statistics.argmax)
        return statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, ignored, expected, target, *finished = ctx.saved_tensors
        tiles = _Tiles(hidden, weight, bias, ignored, ctx.head)
        gradient = logit_gradient(Finished(*finished), ignored, ctx.scale, gradients)
        if expected is None:
            needed = ctx.needs_input_grad[:3]
            d_hidden, d_weight, d_bias = _tiled_gradients(tiles, targets, gradient, ctx.scale, needed)
        else:
            d_hidden = _frozen_gradient(tiles, targets, gradient, expected, target)
            d_weight = d_bias = None
        group = ctx.head.shard.group
        if d_hidden is not None:
            if group is not None and ctx.head.sum_hidden:
                dist.all_reduce(d_hidden, group=group)
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _frozen_gradient(
    tiles: _Tiles,
    targets: torch.Tensor,
    gradient: LogitGradient,
    expected: torch.Tensor,
    target: torch.Tensor,
) -> torch.Tensor:
    """The hidden gradient from the expected rows of the head and each target's own row."""
    shard = tiles.head.shard
    places = TargetColumns.among(targets, tiles.ignored, shard.start, shard.width)
    d_hidden = expected * gradient.power[:, None]
    if shard.width:
        strength = (gradient.target * tiles.slope(target)).where(places.owned, 0)
        d_hidden += tiles.weight[places.column].to(tiles.dtype).mul_(strength[:, None])
    return d_hidden.masked_fill_(gradient.ignored[:, None], 0)


def _tiled_gradients(
    tiles: _Tiles,
    targets: torch.Tensor,
    gradient: LogitGradient,
    scale: Scale,
    needed: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of hidden (in the statistics dtype, this rank's part), weight and bias, tile by tile.

    Each stretch of the weight gradient is summed over all tokens before it is rounded.
    """
    shard, hidden, weight, bias = tiles.head.shard, tiles.hidden, tiles.weight, tiles.bias
    d_hidden = hidden.new_zeros(hidden.shape, dtype=tiles.dtype) if needed[0] else None
    d_weight = torch.zeros_like(weight) if needed[1] else None
    d_bias = torch.zeros_like(bias, dtype=tiles.dtype) if bias is not None and needed[2] else None
    for stretch, part in tiles.vocabulary():
        places = TargetColumns.among(targets, tiles.ignored, shard.start + stretch.start, part.shape[0])
        d_part = part.new_zeros(part.shape, dtype=tiles.dtype)
        for span, rows in tiles.tokens():
            tile = tiles.logits(rows, stretch, part)
            slope = tiles.slope(tile)
            write_gradient(tile, places.rows(span), gradient.rows(span), scale.rows(span), out=tile)
            tile *= slope
            operand = tile.to(part.dtype)
            if d_hidden is not None:
                add_product_(d_hidden[span], operand, part)
            if d_weight is not None:
                add_product_(d_part, operand.t(), rows)
            if d_bias is not None:
                d_bias[stretch] += tile.sum(0)
        if d_weight is not None:
            d_weight[stretch] = d_part
    if d_bias is not None and bias is not None:
        d_bias = d_bias.to(bias.dtype)
    return d_hidden, d_weight, d_bias
