"""The block mask of flex attention, built on the device from rows of tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from fsdp_runtime.steps.context.masks import SequenceMask

#: Tokens of a block, torch's default.
_BLOCK = 128
#: Blocks of queries for which the mask of all keys is in memory at once.
_BLOCKS_AT_ONCE = 8


def block_mask(mask: SequenceMask) -> BlockMask:
    """Return the block mask of this rank's queries and all keys, built once per mask without a host wait."""
    if mask.blocks is None:
        mask.blocks = _built(mask)
    built: BlockMask = mask.blocks
    return built


def _built(mask: SequenceMask) -> BlockMask:
    keys = torch.arange(mask.layout.length, device=mask.device)
    queries = mask.layout.positions.to(mask.device)
    of_indices: Any = getattr(mask.between, "of_indices")  # noqa: B009  # masks of tests are plain functions
    some, every = [], []
    for part in queries.split(_BLOCK * _BLOCKS_AT_ONCE):
        blocks = _by_block(mask.between(part, keys))
        some.append(blocks.any(-1).any(-2))
        every.append(blocks.all(-1).all(-2))
    seen, full = torch.cat(some, dim=2), torch.cat(every, dim=2)
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~full),
        *_listed(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=lambda batch, head, query, key: of_indices(batch, head, queries[query], key),
        seq_lengths=(len(queries), len(keys)),
    )


def _by_block(tile: Tensor) -> Tensor:
    """Return a mask ``[batch, 1, queries, keys]`` as ``[batch, 1, blocks, 128, blocks, 128]``; nothing is seen beyond."""
    queries, keys = tile.shape[2:]
    padded = pad(tile, (0, -keys % _BLOCK, 0, -queries % _BLOCK))
    return padded.unflatten(3, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true blocks of each row of blocks, and their places first."""
    places = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32), places.to(torch.int32)
