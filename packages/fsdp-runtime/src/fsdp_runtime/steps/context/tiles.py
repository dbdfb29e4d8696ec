"""Attention of some queries to some keys, and the sum of these parts by their log-sum-exp.

``lse`` is the logarithm of the denominator of the softmax over the keys of a part.  Parts add up exactly (online
softmax, Milakov and Gimelshein, arXiv:1805.02867); in backward a part's weights follow from the total ``lse``, so no
part is kept (FlashAttention, Dao et al., arXiv:2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_runtime._torch_compat import flash_attention, flash_attention_backward, varlen_part, varlen_part_backward
from fsdp_runtime.steps.attention.segments import Segments


@dataclass(frozen=True)
class Block:
    """A part of attention."""

    queries: slice  # places among this rank's queries
    keys: slice  # places among the keys at hand
    causal: bool = False  # queries and keys are of the same tokens, and a query sees the keys up to its token
    mask: Tensor | None = None  # ``[batch, 1, queries, keys]`` bool
    fused: bool = False  # a kernel computes it
    segments: Segments | None = None  # a kernel computes it within documents


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and of ``lse``: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """Compute one part of attention: its output, and its ``lse`` ``[batch, heads, queries]``, ``-inf`` for no keys."""
    if block.fused:
        return flash_attention(query, key, value, causal=block.causal, scale=scale)
    if block.segments is not None:
        sees, (q, k, v) = block.segments.sees, map(_flat, (query, key, value))
        output, lse = varlen_part(q, k, v, block.segments.bounds, causal=block.causal, scale=scale)
        lse = torch.unflatten(lse, 1, (len(query), -1)).movedim(1, 0)
        output = _by_rows(output, query).masked_fill(~sees.unsqueeze(-1), 0.0)
        return output, lse.masked_fill(~sees, float("-inf"))
    scores = _scores(query, key, block, scale)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - _finite(lse).unsqueeze(-1)).exp()
    output = weights.to(value.dtype) @ value.unsqueeze(2)
    return output.flatten(1, 2), lse.flatten(1, 2)


def add_part(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a part to the sum, in place."""
    total = torch.logaddexp(lse, part_lse)
    shift = _finite(total)
    output.mul_((lse - shift).exp().unsqueeze(-1)).add_(part * (part_lse - shift).exp().unsqueeze(-1))
    lse.copy_(total)


def set_part(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Begin the sum with a part, in place."""
    output.copy_(part)
    lse.copy_(part_lse)


def attend_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a part's gradients of queries, keys and values from the output and the ``lse`` of all parts."""
    if block.fused:
        return flash_attention_backward(grad_output, query, key, value, output, lse, causal=block.causal, scale=scale)
    if block.segments is not None:
        gradient, q, k, v, known = map(_flat, (grad_output, query, key, value, output))
        lse, bounds = lse.movedim(0, 1).flatten(1).contiguous(), block.segments.bounds
        gradients = varlen_part_backward(gradient, q, k, v, known, lse, bounds, causal=block.causal, scale=scale)
        grad_query, grad_key, grad_value = map(_by_rows, gradients, (query, key, value))
        return grad_query, grad_key, grad_value
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    scores = _scores(query, key, block, scale)
    weights = (scores - torch.unflatten(_finite(lse), 1, groups).unsqueeze(-1)).exp()
    gradient = torch.unflatten(grad_output, 1, groups)
    grad_value = (weights.to(value.dtype).transpose(-1, -2) @ gradient).sum(2)
    grad_weights = (gradient @ value.unsqueeze(2).transpose(-1, -2)).to(weights.dtype)
    inner = (gradient * torch.unflatten(output, 1, groups)).sum(-1, keepdim=True, dtype=weights.dtype)
    grad_scores = (weights * (grad_weights - inner) * scale).to(query.dtype)
    grad_query = (grad_scores @ key.unsqueeze(2)).flatten(1, 2)
    grad_key = (grad_scores.transpose(-1, -2) @ torch.unflatten(query, 1, groups)).sum(2)
    return grad_query, grad_key, grad_value


def _flat(rows: Tensor) -> Tensor:
    """Return ``[batch, heads, tokens, dim]`` as ``[batch * tokens, heads, dim]``."""
    return rows.transpose(1, 2).flatten(0, 1)


def _by_rows(flat: Tensor, like: Tensor) -> Tensor:
    return torch.unflatten(flat, 0, (len(like), -1)).transpose(1, 2)


def _scores(query: Tensor, key: Tensor, block: Block, scale: float) -> Tensor:
    """Return ``[batch, kv_heads, queries per key, queries, keys]``, ``-inf`` where a key is not seen."""
    grouped = torch.unflatten(query, 1, (key.shape[1], query.shape[1] // key.shape[1]))
    scores: Tensor = (grouped @ key.unsqueeze(2).transpose(-1, -2)).to(statistics_dtype(query.dtype)) * scale
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if block.mask is not None:
        scores = scores.masked_fill(~block.mask.unsqueeze(2), float("-inf"))
    return scores


def _finite(lse: Tensor) -> Tensor:
    """Return ``lse`` with zero for queries that see nothing; their weights become zero."""
    return lse.masked_fill(lse == float("-inf"), 0.0)
