"""Statistics of an LM head on hidden states by Triton kernels: in forward, two launches per tile of logits.

Forward: a product into a float32 tile, and one kernel that adds the tile to the sums of its tokens.  Backward: the
product again, one kernel that writes the tile's gradient in the dtype of the operands, and the products of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from rl_logprobs._torch_compat import add_product_, wide_product
from rl_logprobs.softmax.fused_linear import HeadReducer, HeadTiles, TileGradient, accelerator_tile
from rl_logprobs.softmax.triton_softmax import Launcher
from rl_logprobs.softmax.vocab_parallel import Gradients, TokenStatistics


class TritonTiles(HeadTiles):
    """The tiles of one head as products, from which the kernels compute the logits."""

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Tokens and vocabulary ids of one tile: all tokens where they fit, so that a weight tile has one product."""
        return accelerator_tile(self.hidden.shape[0])

    @cached_property
    def operand(self) -> torch.Tensor:
        """The hidden states as an operand, unchanged for ignored tokens."""
        return self.hidden.to(self.operand_dtype)

    def rows(self, span: slice) -> torch.Tensor:
        """Return the hidden states of some tokens."""
        return self.operand[span]

    def tile(self, span: slice, cols: slice) -> torch.Tensor:
        """Return the products of some tokens and columns, a new tensor."""
        return wide_product(self.rows(span), self.weight[cols].to(self.operand_dtype).t(), self.dtype)

    def gradients(self, needed: Sequence[bool], write: TileGradient) -> Gradients:
        """Return the gradients of hidden, weight and bias, tile by tile; hidden's is all-reduced."""
        # A token without a target may have hidden states that are not finite, and 0 times these is NaN.
        hidden = self.hidden.masked_fill(self.ignored[:, None], 0) if needed[1] else self.hidden
        return HeadTiles.gradients(replace(self, hidden=hidden), needed, write)

    def tile_gradient(
        self, rows: torch.Tensor, weight: torch.Tensor, span: slice, cols: slice, write: TileGradient
    ) -> torch.Tensor:
        """Return the gradient of a tile's products in the dtype of the operands."""
        products = wide_product(rows, weight.t(), self.dtype)
        gradient = products if weight.dtype is products.dtype else torch.empty_like(products, dtype=weight.dtype)
        write(products, span, cols, gradient)
        return gradient


@dataclass(frozen=True)
class TritonHead(HeadReducer):
    """The statistics of a head by Triton kernels, of the shape of the ids, which the device checks."""

    tiles: ClassVar[type[HeadTiles]] = TritonTiles

    launcher: Launcher

    def reduce(
        self, tiles: HeadTiles, ids: torch.Tensor, expected_rows: torch.Tensor | None
    ) -> tuple[TokenStatistics, torch.Tensor, Sequence[torch.Tensor | None]]:
        """Return the statistics, the sums ``[fields, tokens]`` of this rank's columns, and totals of all ranks."""
        state, valid = self.launcher.new_state(ids)
        arguments: dict[str, Any] = {"expected_rows": expected_rows, "features": tiles.hidden.shape[1], "MERGE": True}
        for cols, weight in tiles.vocab_tiles():
            arguments |= {"initial": int(cols.start == 0), "valid": valid if cols.start == 0 else None}
            arguments |= {"width": weight.shape[0], "start": self.head.shard.start + cols.start}
            arguments |= head_map(tiles, cols)
            for span, rows in tiles.token_tiles():
                logits = wide_product(rows, weight.t(), self.dtype)
                weights = None
                if expected_rows is not None:
                    weights = logits if weight.dtype is logits.dtype else torch.empty_like(logits, dtype=weight.dtype)
                self.launcher.reduce(logits, ids, state, span.start, weights=weights, **arguments)
                if expected_rows is not None and weights is not None:
                    add_product_(expected_rows[span], weights, weight)
                del logits, weights  # before the next tile is allocated
        self.launcher.check(valid)
        statistics, totals = self.launcher.finish(state, ids)
        return statistics, state, [totals]

    def frozen_coefficients(
        self, tiles: HeadTiles, ids: torch.Tensor, local: torch.Tensor, totals: Sequence[Any], gradients: Gradients
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the coefficients of the expected rows and of the targets' rows, and the targets' logits."""
        factors = self.launcher.coefficients(totals[0], ids, gradients, local)
        return factors[0], factors[2], local[2].to(self.dtype)

    def writer(self, tiles: HeadTiles, ids: torch.Tensor, totals: Sequence[Any], gradients: Gradients) -> TileGradient:
        """Return the function that writes the gradient of one tile of products."""
        arguments = {"totals": totals[0], "ENTROPY": gradients[2] is not None}
        arguments["coefficients"] = self.launcher.coefficients(totals[0], ids, gradients, None)

        def write(products: torch.Tensor, span: slice, cols: slice, out: torch.Tensor) -> None:
            place = {"width": products.shape[1], "start": self.head.shard.start + cols.start}
            self.launcher.write(products, out, ids, span.start, **arguments, **place, **head_map(tiles, cols))

        return write


def head_map(tiles: HeadTiles, cols: slice) -> dict[str, Any]:
    """Return the kernels' arguments of the map from products to logits."""
    scale, bias = tiles.head.logit_scale, None if tiles.bias is None else tiles.bias[cols]
    return {"biases": bias, "SCALE": None if scale == 1.0 else scale, "SOFTCAP": tiles.head.softcap}
