"""Ring attention: keys and values pass from rank to rank over ``cp``, and queries stay.

Each rank holds the keys of one other rank at a time, adds this part of attention to its sum, and passes them on while
it computes (Liu et al., arXiv:2310.01889).  In backward the keys circulate again, and the gradients of keys and values
return to their rank.  Parts that no query sees (later tokens, tokens beyond a sliding window, other documents) are not
computed.

``lse`` is the logarithm of the denominator of the softmax over the keys of a part.  Parts add up exactly (online
softmax, Milakov and Gimelshein, arXiv:1805.02867); in backward a part's weights follow from the total ``lse``, so no
part is kept (FlashAttention, Dao et al., arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime._torch_compat import (
    flash_attention,
    flash_attention_backward,
    has_flash_attention,
    varlen_part,
    varlen_part_backward,
)
from fsdp_runtime.steps.context.masks import EVERYTHING, NOTHING, SequenceMask, chunk_places, tiles
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.steps.documents.documents import Segments
from tp_plans.runtime import direct


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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # messages between ranks
def attend_around(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SequenceMask | None,
    layout: SequenceLayout,
    group: ProcessGroup,
    *,
    causal: bool,
    scale: float | None,
    within: bool = False,
) -> Tensor:
    """Compute attention of this rank's queries ``[batch, heads, seq / cp, dim]`` to the keys of all ranks."""
    # Without a mask and with ``causal``, a query sees the tokens up to its position. ``within`` needs a kernel that
    # knows documents.
    parts = Parts(layout, mask, causal, has_flash_attention(query, value), within)
    output: Tensor = attend_in_parts(query, key, value, parts, group, scale)
    return output


@dataclass(frozen=True)
class Prefixes:
    """The parts of causal attention to all keys: for each chunk, the keys before it and the chunk's own keys."""

    layout: SequenceLayout

    def of(self, _owner: int) -> Iterator[Block]:
        """Yield the parts of this rank's chunks."""
        size = self.layout.length // self.layout.num_chunks
        for at, chunk in enumerate(self.layout.chunks):
            queries, start = slice(at * size, (at + 1) * size), chunk * size
            if start:
                yield Block(queries, slice(0, start), fused=True)
            yield Block(queries, slice(start, start + size), causal=True, fused=True)


@dataclass(frozen=True)
class Parts:
    """The parts of attention that a rank computes with another rank's keys."""

    layout: SequenceLayout
    mask: SequenceMask | None
    causal: bool
    fused: bool
    by_segments: bool = False

    def of(self, owner: int) -> Iterator[Block]:
        """Yield the parts with the keys of a rank, except for parts that no query sees."""
        size = self.layout.length // self.layout.num_chunks
        for at, chunk in enumerate(self.layout.chunks):
            for other_at, other in enumerate(self.layout.chunks_of(owner)):
                if (self.mask is None or self.by_segments) and self.causal and other > chunk:
                    continue
                # From places in the sequence to places on the ranks.
                shifts = (at - chunk) * size, (other_at - other) * size
                yield from self._within(chunk, other, *shifts)

    def _within(self, chunk: int, other: int, shift: int, other_shift: int) -> Iterator[Block]:
        diagonal = self.causal and chunk == other
        if self.by_segments or (self.mask is None and self.fused):
            own, others = chunk_places(self.layout, chunk), chunk_places(self.layout, other)
            segments = self.mask.between_chunks(chunk, other) if self.mask is not None else None
            fused = segments is None
            yield Block(_moved(own, shift), _moved(others, other_shift), diagonal, fused=fused, segments=segments)
            return
        for queries in tiles(self.layout, chunk):
            for keys in tiles(self.layout, other):
                places = _moved(queries, shift), _moved(keys, other_shift)
                if self.mask is None:
                    if not diagonal or keys <= queries:
                        yield Block(*places, causal=diagonal and keys == queries)
                elif (shown := self.mask.shows(queries, keys)) != NOTHING:
                    yield Block(*places, mask=None if shown == EVERYTHING else self.mask.tile(queries, keys))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: Parts | Prefixes,
        group: ProcessGroup | None,
        scale: float | None,
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        dtype = statistics_dtype(query.dtype)
        output = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=dtype)
        lse = query.new_full(query.shape[:3], float("-inf"), dtype=dtype)
        begun: set[int] = set()  # queries with a part in the output
        for owner, (keys, values) in _around(key, value, group):
            for block in parts.of(owner):
                seen = keys[:, :, block.keys], values[:, :, block.keys]
                part = attend(query[:, :, block.queries], *seen, block, scale)
                into = output[:, :, block.queries], lse[:, :, block.queries]
                if block.queries.start in begun:
                    add_part(*into, *part)
                else:
                    for begun_with, begin in zip(into, part, strict=True):
                        begun_with.copy_(begin)
                    begun.add(block.queries.start)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.parts, ctx.group, ctx.scale = parts, group, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        own, carried = key.new_empty(0), None
        for owner, (keys, values) in _around(key, value, ctx.group):
            grad_keys = keys.new_zeros(*keys.shape[:3], keys.shape[3] + values.shape[3], dtype=lse.dtype)
            for block in ctx.parts.of(owner):
                q, k = block.queries, block.keys
                of_keys = keys[:, :, k], values[:, :, k]
                known = output[:, :, q], lse[:, :, q]
                part, *others = attend_backward(
                    gradients[0][:, :, q], query[:, :, q], *of_keys, *known, block, ctx.scale
                )
                grad_query[:, :, q] += part
                grad_keys[:, :, k] += torch.cat(others, dim=-1)
            if ctx.group is None or owner == dist.get_rank(ctx.group):
                own = grad_keys
            else:
                if carried is not None:
                    grad_keys += carried.wait()
                carried = _Passed(grad_keys, ctx.group)
        if carried is not None:
            own += carried.wait()
        grad_key, grad_value = own.to(key.dtype).split([key.shape[3], value.shape[3]], dim=-1)
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None


#: Of queries, keys, values, the parts, a group or ``None`` for gathered keys and values, and a scale or ``None``.
attend_in_parts = direct(_Ring)


def _around(key: Tensor, value: Tensor, group: ProcessGroup | None) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield each rank of a group with its keys and values, this rank first; the next rank's keys are in transit."""
    if group is None:
        yield 0, (key, value)
        return
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    at_hand = torch.cat([key, value], dim=-1)
    for step in range(ranks):
        passed = _Passed(at_hand, group) if step < ranks - 1 else None
        yield (rank - step) % ranks, (at_hand[..., : key.shape[3]], at_hand[..., key.shape[3] :])
        if passed is not None:
            at_hand = passed.wait()


class _Passed:
    """A tensor sent to the next rank, while the previous rank's tensor is received."""

    def __init__(self, sent: Tensor, group: ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent, self.received = sent.contiguous(), torch.empty_like(sent, memory_format=torch.contiguous_format)
        following, before = (dist.get_global_rank(group, (rank + by) % ranks) for by in (1, -1))
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, following, group),
                dist.P2POp(dist.irecv, self.received, before, group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _moved(places: tuple[int, int], shift: int) -> slice:
    return slice(places[0] + shift, places[1] + shift)
