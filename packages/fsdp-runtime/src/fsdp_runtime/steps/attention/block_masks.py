"""Flex attention under a block mask that is built on the device from rows of tiles, without a host wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsdp_runtime._torch_compat import flex_attention
from fsdp_runtime.steps.context.masks import SequenceMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

#: Tokens of a block, torch's default, and the queries with a mask of all keys in memory at once.
_BLOCK, _AT_ONCE = 128, 1024


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SequenceMask,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention ``[batch, queries, heads, value_dim]``; sinks rescale the output by its log-sum-exp."""
    groups = query.shape[1] // key.shape[1]
    if groups & (groups - 1):  # flex attention groups by powers of two
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    output, lse = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else lambda score, *_: softcap * torch.tanh(score / softcap),
        block_mask=block_mask(mask),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if sinks is not None:
        output = output * torch.sigmoid(lse - sinks.to(lse.dtype).view(1, -1, 1)).unsqueeze(-1).to(output.dtype)
    return output.transpose(1, 2)


def block_mask(mask: SequenceMask) -> BlockMask:
    """Return the block mask of this rank's queries and all keys, built once per mask."""
    if mask.blocks is None:
        from torch.nn.attention.flex_attention import BlockMask

        keys = torch.arange(mask.layout.length, device=mask.device)
        queries, of_indices = mask.layout.positions.to(mask.device), mask.of_indices
        tiles = [_by_block(mask.between(part, keys)) for part in torch.split(queries, _AT_ONCE)]
        some, every = (torch.cat(parts, dim=2) for parts in zip(*tiles, strict=True))
        mask.blocks = BlockMask.from_kv_blocks(
            *_listed(some & ~every),
            *_listed(every),
            BLOCK_SIZE=_BLOCK,
            mask_mod=lambda batch, head, query, key: of_indices(batch, head, queries[query], key),
            seq_lengths=(len(queries), len(keys)),
        )
    built: BlockMask = mask.blocks
    return built


def _by_block(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each block of a mask ``[batch, 1, queries, keys]`` if some pair, and if every pair is seen."""
    padded: Any = pad(tile, (0, -tile.shape[3] % _BLOCK, 0, -tile.shape[2] % _BLOCK))
    blocks = padded.unflatten(3, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
    return blocks.any(-1).any(-2), blocks.all(-1).all(-2)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true blocks of each row of blocks, and their places first."""
    places = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32), places.to(torch.int32)
