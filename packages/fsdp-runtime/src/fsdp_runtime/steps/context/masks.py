"""The mask of attention over rows, or over a sharded sequence.  It builds any block and keeps none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime._transformers_compat.masks import MaskPattern
from fsdp_runtime.errors import LayoutError
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.steps.documents.documents import Documents, Segments

#: Queries per tile of attention, and keys per tile.  Masks are built and skipped by tile.
TILE = 1024
#: Tiles of keys per mask, when masks are built to find the tiles that no query sees.
_TILES_AT_ONCE = 32

#: The content of a mask's tile; a dry run, which reads 0 from every tensor, computes and masks all tiles.
SOME, NOTHING, EVERYTHING = 0, 1, 2


@dataclass(eq=False)
class SequenceMask:
    """The attention mask of one kind of layer in one forward."""

    # ``between`` returns ``[batch, 1, queries, keys]`` bool for two vectors of places in the full sequence.
    # ``additive`` is the dtype of a mask that is added to scores, as in eager attention, or ``None`` for bool.
    between: Callable[[Tensor, Tensor], Tensor]
    layout: SequenceLayout
    device: torch.device
    additive: torch.dtype | None = None
    pattern: MaskPattern | None = None  # ``None`` if no pattern within ``isolated`` describes the mask
    isolated: Documents = field(default_factory=lambda: Documents(torch.empty(0, 0)))  # parts of rows, seen from inside
    of_indices: Any = None  # the mask of batch, head, query and key index
    blocks: Any = None  # the block mask of flex attention, once it is built
    _between: dict[tuple[int, int], Segments] = field(default_factory=dict)

    @cached_property
    def full(self) -> Tensor:
        """``[batch, 1, seq, seq]``."""
        return self._of(torch.arange(self.layout.length, device=self.device))

    @cached_property
    def rows(self) -> Tensor:
        """``[batch, 1, seq / cp, seq]``, of this rank's queries."""
        return self.full if self.layout.ranks == 1 else self._of(self.layout.positions.to(self.device))

    def _of(self, queries: Tensor) -> Tensor:
        mask = self.between(queries, torch.arange(self.layout.length, device=self.device))
        if (dtype := self.additive) is None:
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    @property
    def window(self) -> tuple[int, int]:
        """The keys before and after a query that kernels compute; -1 for all of its segment."""
        if self.pattern is None or not self.pattern.causal:
            return -1, -1
        return -1 if self.pattern.window is None else self.pattern.window - 1, 0

    @cached_property
    def segments(self) -> tuple[Segments, ...]:
        """The segments of each of this rank's chunks."""
        ranges = [chunk_places(self.layout, chunk) for chunk in self.layout.chunks]
        ends = [stop if self.window[1] == 0 else self.layout.length for _, stop in ranges]
        return tuple(self.isolated.segments(each, (0, end)) for each, end in zip(ranges, ends, strict=True))

    def between_chunks(self, chunk: int, other: int) -> Segments:
        """Return the segments from a chunk's queries to a chunk's keys, built once for all layers."""
        if (chunk, other) not in self._between:
            places = chunk_places(self.layout, chunk), chunk_places(self.layout, other)
            self._between[chunk, other] = self.isolated.segments(*places)
        return self._between[chunk, other]

    def __getitem__(self, index: Any) -> SequenceMask:
        """Return itself for an index of all tokens.  Gemma 4 cuts masks to the last ``logits_to_keep`` by an index."""
        if any(slice(part.start or None, part.stop, part.step) != slice(None) for part in index):
            raise LayoutError("attention over cp computes all tokens of a rank: leave logits_to_keep out, or pass 0")
        return self

    def tile(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """Return ``[batch, 1, queries, keys]`` for two ranges of places."""
        return self.between(torch.arange(*queries, device=self.device), torch.arange(*keys, device=self.device))

    def shows(self, queries: tuple[int, int], keys: tuple[int, int]) -> int:
        """Return whether some, all or none of a tile's keys are seen; waits for the device, once per mask."""
        return self._shown[queries][keys]

    @cached_property
    def _shown(self) -> dict[tuple[int, int], dict[tuple[int, int], int]]:
        rows = [tile for chunk in self.layout.chunks for tile in tiles(self.layout, chunk)]
        columns = [tile for chunk in range(self.layout.num_chunks) for tile in tiles(self.layout, chunk)]
        contents = []
        for row in rows:
            for at in range(0, len(columns), _TILES_AT_ONCE):
                together = columns[at : at + _TILES_AT_ONCE]
                mask = self.tile(row, (together[0][0], together[-1][1]))
                for part in torch.split(mask, [end - start for start, end in together], dim=-1):
                    contents.append((~part.any()).long() * NOTHING + part.all().long() * EVERYTHING)
        counts = iter(torch.stack(contents).tolist())
        return {row: {column: next(counts) for column in columns} for row in rows}


def chunk_places(layout: SequenceLayout, chunk: int) -> tuple[int, int]:
    """Return the range of places of a chunk."""
    size = layout.length // layout.num_chunks
    return size * chunk, size * (chunk + 1)


def tiles(layout: SequenceLayout, chunk: int) -> list[tuple[int, int]]:
    """Return the ranges of places of a chunk's tiles."""
    first, end = chunk_places(layout, chunk)
    return [(start, min(start + TILE, end)) for start in range(first, end, TILE)]
