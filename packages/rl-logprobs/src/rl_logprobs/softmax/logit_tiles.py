"""Logits as tiles of a few tokens, without a copy of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_logprobs.softmax.fused_linear import Gradients, TileGradient
from rl_logprobs.softmax.row_blocks import leading_dims_merge, tile_spans


@dataclass(frozen=True)
class LogitTiles:
    """The first ``width`` columns of logits ``[..., columns]``, of any strides, in tiles of ``size``."""

    values: torch.Tensor
    width: int
    size: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self.values.dtype

    def tile(self, span: slice, cols: slice) -> torch.Tensor:
        """Return the logits of some tokens and columns: a view, or a copy where the leading dims do not merge."""
        leading, columns = self.values.shape[:-1], self.values.shape[-1]
        if leading_dims_merge(self.values):
            return self.values.view(leading.numel(), columns)[span, cols]
        rows = torch.arange(span.start, span.stop, device=self.values.device)
        return self.values[..., cols][torch.unravel_index(rows, leading)]

    def gradients(self, needed: Sequence[bool], write: TileGradient) -> Gradients:
        """Return the gradient of the logits; 0 in the columns beyond ``width``."""
        if not needed[0]:
            return (None,)
        out = torch.zeros_like(self.values, memory_format=torch.contiguous_format)
        flat = out.view(out.shape[:-1].numel(), out.shape[-1])
        for span, cols in tile_spans(flat.shape[0], self.width, self.size):
            write(self.tile(span, cols), span, cols, flat[span, cols])
        return (out,)
