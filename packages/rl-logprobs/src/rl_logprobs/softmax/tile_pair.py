"""The two distributions of a divergence, each of logits or of an LM head, in tiles of the same tokens and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rl_logprobs.softmax.backends import runs_triton
from rl_logprobs.softmax.fused_linear import HeadTiles, LMHead, TileGradient, tile_size
from rl_logprobs.softmax.log2_scale import TemperatureScale, log2_weights
from rl_logprobs.softmax.row_blocks import leading_dims_merge, row_blocks, rows_per_workspace, tile_spans
from rl_logprobs.softmax.triton_linear import TritonTiles
from rl_logprobs.softmax.vocab_parallel import Gradients
from rl_logprobs.softmax.vocab_shard import VocabColumns
from rl_logprobs.tensors import statistics_dtype


@dataclass(frozen=True)
class LogitTiles:
    """The first ``width`` columns of logits ``[..., columns]``, of any strides, in tiles of ``tile_shape``."""

    values: torch.Tensor
    width: int
    tile_shape: tuple[int, int]

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
        for span, cols in tile_spans(flat.shape[0], self.width, self.tile_shape):
            write(self.tile(span, cols), span, cols, flat[span, cols])
        return (out,)


#: The logits of one side, computed a tile at a time.
Tiles = LogitTiles | HeadTiles


@dataclass(frozen=True)
class Side:
    """One of the two distributions."""

    tensors: tuple[Any, ...]  # ``(logits,)``, or ``(hidden, weight, bias or None)`` with ``head``
    shard: VocabColumns  # the columns of both sides
    temperature: float | torch.Tensor = 1.0  # a number, or one number per token
    head: LMHead | None = None

    def tiles(self, ignored: torch.Tensor, other: Side) -> Tiles:
        """Return the tiles of the logits; logits beside a head have tiles of its size."""
        if self.head is None:
            (logits,) = self.tensors
            width, device = self.shard.width, logits.device
            whole_rows = rows_per_workspace(width, device), max(1, width)
            return LogitTiles(logits, width, whole_rows if other.head is None else tile_size(device, ignored.shape[0]))
        hidden, weight, bias = self.tensors
        tiles = TritonTiles if runs_triton(ignored.device) else HeadTiles
        return tiles(hidden, weight, bias, ignored, self.head)


@dataclass(frozen=True)
class TilePair:
    """Tiles and temperatures of ``p`` and ``q``, in the dtype of the wider."""

    p: Tiles
    q: Tiles
    p_scale: TemperatureScale
    q_scale: TemperatureScale
    ignored: torch.Tensor
    shard: VocabColumns
    dtype: torch.dtype

    @property
    def on_triton(self) -> bool:
        """Whether Triton's kernels compute the tiles."""
        return runs_triton(self.ignored.device)

    @classmethod
    def of(cls, p: Side, q: Side, ignored: torch.Tensor) -> TilePair:
        """Return the tiles of two sides."""
        tiles = p.tiles(ignored, q), q.tiles(ignored, p)
        dtype = statistics_dtype(torch.promote_types(tiles[0].dtype, tiles[1].dtype))
        p_scale, q_scale = (TemperatureScale.of(side.temperature, dtype) for side in (p, q))
        return cls(*tiles, p_scale, q_scale, ignored, p.shard, dtype)

    def swapped(self) -> TilePair:
        """Return the pair with ``p`` and ``q`` exchanged."""
        return replace(self, p=self.q, q=self.p, p_scale=self.q_scale, q_scale=self.p_scale)

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """Yield tokens and columns of the tiles."""
        return tile_spans(self.ignored.shape[0], self.shard.width, self.p.tile_shape)

    def exponents(
        self, p_tile: torch.Tensor, q_tile: torch.Tensor, span: slice, p_max: torch.Tensor, q_max: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield ``y`` and ``v`` of a few tokens of a tile at a time, with the slice of those tokens within the tile."""
        p_max, q_max = p_max[span].to(self.dtype), q_max[span].to(self.dtype)
        p_scale, q_scale = self.p_scale.slice_tokens(span), self.q_scale.slice_tokens(span)
        rows = rows_per_workspace(p_tile.shape[1], p_tile.device)
        for part, (p_block, q_block) in row_blocks(rows, p_tile, q_tile):
            y = log2_weights(p_block.to(self.dtype), p_max[part], p_scale.slice_tokens(part))
            v = log2_weights(q_block.to(self.dtype), q_max[part], q_scale.slice_tokens(part))
            yield part, y, v
