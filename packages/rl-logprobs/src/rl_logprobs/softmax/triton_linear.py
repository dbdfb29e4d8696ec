"""Statistics of an LM head on hidden states by Triton kernels: in forward, two launches per tile of logits.

Forward: a product into a float32 tile, and one kernel that adds the tile to the sums of its tokens.  Backward: the
product again, one kernel that writes the tile's gradient in the dtype of the operands, and the products of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rl_logprobs._torch_compat import add_product_, apply_function, first_derivative, wide_product
from rl_logprobs.softmax import fused_linear
from rl_logprobs.softmax.fused_linear import Gradients, HeadTiles, LMHead, wider_tile
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.softmax.triton_backend import reduce_rows, temperatures_of, write_rows
from rl_logprobs.softmax.triton_softmax import check_ids, coefficients, fields, finish, valid_ids
from rl_logprobs.softmax.vocab_parallel import TokenStatistics


def triton_linear_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    ignore_index: int,
    head: LMHead,
    options: SoftmaxOptions,
) -> TokenStatistics:
    """Return statistics as ``linear_softmax_statistics`` does, of the shape of ``ids``, which the device checks."""
    given = hidden, weight, bias, ids.contiguous(), ignore_index, head, options
    return TokenStatistics(*apply_function(_TritonLinear, *given))


class _TritonLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        ignore_index: int,
        head: LMHead,
        options: SoftmaxOptions,
    ) -> TokenStatistics:
        tiles = HeadTiles(hidden, weight, bias, ids, head)
        temperatures = temperatures_of(options.temperature, ids.device)
        d_hidden, d_weight, d_bias, *_ = ctx.needs_input_grad
        frozen = d_hidden and not (d_weight or d_bias or options.entropy)
        expected_rows = hidden.new_zeros(hidden.shape, dtype=tiles.dtype) if frozen else None
        state = _reduce_tiles(tiles, ids, ignore_index, options, temperatures, expected_rows)
        shard = head.shard
        statistics, totals = finish(state, ids, ignore_index, shard, options, temperatures, tiles.dtype)
        local = None if expected_rows is None else state
        ctx.save_for_backward(hidden, weight, bias, ids, expected_rows, local, totals)
        ctx.head, ctx.ignore_index, ctx.temperatures = head, ignore_index, temperatures
        ctx.set_materialize_grads(False)
        if statistics.argmax is not None:
            ctx.mark_non_differentiable(statistics.argmax)
        return statistics

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, ids, expected_rows, local, totals = ctx.saved_tensors
        tiles = HeadTiles(hidden, weight, bias, ids, ctx.head)
        factors = coefficients(totals, ids, ctx.ignore_index, gradients, ctx.temperatures, tiles.dtype, local)
        if expected_rows is None:
            given = {
                "totals": totals,
                "coefficients": factors,
                "ignore_index": ctx.ignore_index,
                "ENTROPY": gradients[2] is not None,
                **ctx.temperatures,
            }

            def write(products: torch.Tensor, span: slice, cols: slice, out: torch.Tensor) -> None:
                columns = {"width": products.shape[1], "start": ctx.head.shard.start + cols.start}
                arguments = {**given, **columns, **head_map(tiles, cols)}
                write_rows(products, out, ids, tiles.dtype, arguments, span.start)

            found = head_gradients(tiles, ctx.needs_input_grad[:3], ids.view(-1) == ctx.ignore_index, write)
        else:
            d_hidden = _frozen_head_gradient(tiles, ids, ctx.ignore_index, factors, expected_rows, local)
            found = tiles.reduced(d_hidden), None, None
        return *found, None, None, None, None


def _reduce_tiles(
    tiles: HeadTiles,
    ids: torch.Tensor,
    ignore_index: int,
    options: SoftmaxOptions,
    temperatures: dict[str, Any],
    expected_rows: torch.Tensor | None,
) -> torch.Tensor:
    """Return the sums ``[fields, tokens]`` of this rank's columns."""
    # ``expected_rows`` becomes the sum of ``2**y``, times the logits' derivative, times the head's rows.
    shard, tokens, hidden = tiles.head.shard, ids.numel(), tiles.operand
    state = torch.empty(fields(options), tokens, dtype=torch.float64, device=ids.device)
    valid = valid_ids(ids.device)
    size = wider_tile(*fused_linear.ACCELERATOR_TILE, tokens)
    for cols, weight in vocab_tiles(tiles, size[1]):
        for span in token_tiles(tokens, size[0]):
            logits = wide_product(hidden[span], weight.t(), tiles.dtype)
            weights = None
            if expected_rows is not None:
                weights = logits if weight.dtype is logits.dtype else torch.empty_like(logits, dtype=weight.dtype)
            given = {
                "valid": valid if cols.start == 0 else None,
                "weights": weights,
                "expected_rows": expected_rows,
                "width": weight.shape[0],
                "start": shard.start + cols.start,
                "vocab_size": shard.vocab_size,
                "ignore_index": ignore_index,
                "initial": int(cols.start == 0),
                "features": hidden.shape[1],
                "MERGE": True,
                **head_map(tiles, cols),
                **temperatures,
            }
            reduce_rows(logits, ids, state, options, tiles.dtype, given, span.start)
            if expected_rows is not None and weights is not None:
                add_product_(expected_rows[span], weights, weight)
            del logits, weights  # before the next tile is allocated
    check_ids(valid, shard.vocab_size, ignore_index)
    return state


def head_gradients(
    tiles: HeadTiles, needed: Sequence[bool], ignored: torch.Tensor, write: Callable[..., None]
) -> Gradients:
    """Return the gradients of hidden, weight and bias; the weight's gradient is rounded once."""
    # ``write(products, span, cols, gradient)`` writes the gradient of some products to a tensor that may be theirs.
    # Tiles have all tokens where they fit, so that a range of the weight has one product.
    weight, bias, tokens = tiles.weight, tiles.bias, tiles.hidden.shape[0]
    columns, rows = fused_linear.ACCELERATOR_TILE
    size = wider_tile(rows, columns, tokens)
    spans = list(token_tiles(tokens, size[0]))
    # A token without a target may have hidden states that are not finite, and 0 times these is NaN.
    scored = tiles.operand.masked_fill(ignored[:, None], 0) if needed[1] else tiles.operand
    d_hidden = torch.zeros_like(tiles.hidden, dtype=tiles.dtype) if needed[0] else None
    d_weight = torch.empty_like(weight) if needed[1] else None
    d_bias = None
    if bias is not None and needed[2]:
        d_bias = torch.zeros(len(spans), bias.shape[0], dtype=tiles.dtype, device=bias.device)
    if d_weight is not None:
        d_weight[tiles.head.shard.width :].zero_()
    for cols, part in vocab_tiles(tiles, size[1]) if tiles.head.shard.width else ():
        total = None
        for index, span in enumerate(spans):
            products = wide_product(tiles.operand[span], part.t(), tiles.dtype)
            gradient = products if part.dtype is products.dtype else torch.empty_like(products, dtype=part.dtype)
            write(products, span, cols, gradient)
            del products
            if d_hidden is not None:
                add_product_(d_hidden[span], gradient, part)
            if d_weight is not None and len(spans) == 1 and d_weight.dtype is gradient.dtype:
                torch.mm(gradient.t(), scored, out=d_weight[cols])
            elif d_weight is not None and total is None:
                total = wide_product(gradient.t(), scored[span], tiles.dtype)
            elif total is not None:
                add_product_(total, gradient.t(), scored[span])
            if d_bias is not None:
                torch.sum(gradient, 0, dtype=tiles.dtype, out=d_bias[index, cols])
            del gradient
        if d_weight is not None and total is not None:
            d_weight[cols] = total
    if d_bias is not None and bias is not None:
        d_bias = d_bias.sum(0).to(bias.dtype)
    return tiles.reduced(d_hidden), d_weight, d_bias


def _frozen_head_gradient(
    tiles: HeadTiles,
    ids: torch.Tensor,
    ignore_index: int,
    factors: torch.Tensor,
    expected_rows: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return the hidden gradient from the expected rows of the head and the row of each target."""
    shard, flat = tiles.head.shard, ids.view(-1)
    d_hidden = expected_rows * factors[0, :, None]
    column, ignored = flat - shard.start, flat == ignore_index
    owned = (column >= 0) & (column < shard.width) & ~ignored
    if shard.width:
        derivative = tiles.derivative(state[2].to(tiles.dtype))
        target = (factors[2] * derivative).where(owned, 0)
        d_hidden += tiles.weight[column.where(owned, 0)].to(tiles.dtype).mul_(target[:, None])
    return d_hidden.masked_fill_(ignored[:, None], 0)


def vocab_tiles(tiles: HeadTiles, columns: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield ranges of this rank's columns with the head's rows for them; an empty range if the rank has none."""
    width = tiles.head.shard.width
    for start in range(0, max(1, width), columns):
        cols = slice(start, min(width, start + columns))
        yield cols, tiles.weight[cols].to(tiles.operand_dtype)


def token_tiles(tokens: int, rows: int) -> Iterator[slice]:
    """Yield ranges of tokens."""
    return (slice(start, min(tokens, start + rows)) for start in range(0, tokens, rows))


def head_map(tiles: HeadTiles, cols: slice) -> dict[str, Any]:
    """Return the kernels' arguments of the map from products to logits."""
    scale = tiles.head.logit_scale
    return {
        "biases": None if tiles.bias is None else tiles.bias[cols],
        "SCALE": None if scale == 1.0 else scale,
        "SOFTCAP": tiles.head.softcap,
    }
