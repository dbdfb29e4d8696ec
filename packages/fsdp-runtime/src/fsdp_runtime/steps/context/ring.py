"""Ring attention: keys and values pass from rank to rank over ``cp``, and queries stay.

Each rank holds the keys of one other rank at a time, adds this part of attention to its sum (see ``tiles``), and
passes them on while it computes (Liu et al., arXiv:2310.01889).  In backward the keys circulate again, and the
gradients of keys and values return to their rank.  Parts that no query sees (later tokens, tokens beyond a sliding
window, other documents) are not computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime._torch_compat import has_flash_attention
from fsdp_runtime.steps.context.masks import EVERYTHING, NOTHING, SequenceMask, chunk_places, tiles
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.steps.context.tiles import Block, add_part, attend, attend_backward, set_part, statistics_dtype
from tp_plans.runtime import direct


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
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = _ring(query, key, value, parts, group, factor)
    return output


def attend_to_prefixes(
    query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout, *, scale: float | None
) -> Tensor:
    """Compute causal attention to gathered keys without a mask, if no kernel takes fewer queries than keys."""
    # Queries are ``[batch, heads, seq / cp, dim]``, keys and values ``[batch, kv_heads, seq, dim]`` in sequence order.
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = _ring(query, key, value, _Prefixes(layout), None, factor)
    return output


@dataclass(frozen=True)
class _Prefixes:
    """The parts of causal attention to all keys: for each chunk, the keys before it and the chunk's own keys."""

    layout: SequenceLayout

    def of(self, _owner: int) -> Sequence[Block]:
        return _prefixes(self.layout.length // self.layout.num_chunks, self.layout.chunks)


@lru_cache(maxsize=64)
def _prefixes(size: int, chunks: tuple[int, ...]) -> Sequence[Block]:
    """Return the parts of chunks of a size, by their places in the sequence."""
    blocks: list[Block] = []
    for at, chunk in enumerate(chunks):
        queries, start = slice(at * size, (at + 1) * size), chunk * size
        if start:
            blocks.append(Block(queries, slice(0, start), fused=True))
        blocks.append(Block(queries, slice(start, start + size), causal=True, fused=True))
    return blocks


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
        parts: Parts | _Prefixes,
        group: ProcessGroup | None,
        scale: float,
    ) -> Tensor:
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
                    set_part(*into, *part)
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


_ring = direct(_Ring)


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
