"""Attention under a :class:`SequenceMask` by the kernel that the model's decision names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fsdp_runtime._torch_compat import flex_attention, varlen_attention
from fsdp_runtime.steps.attention.block_masks import block_mask
from fsdp_runtime.steps.attention.decision import AttentionKernels, Needs
from fsdp_runtime.steps.context.masks import SequenceMask, chunk_places


def attend(
    kernels: AttentionKernels,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SequenceMask,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Return attention ``[batch, queries, heads, value_dim]``, ``None`` where only the full mask describes it."""
    needs = Needs(
        dtype=query.dtype,
        widths=(query.shape[-1], value.shape[-1]),
        described=mask.is_described,
        keys="rows" if mask.layout.ranks == 1 else "gathered",
        changed_scores=softcap is not None or s_aux is not None,
        biased=position_bias is not None,
        dropout=dropout > 0,
    )
    kernel = kernels.of(needs)
    if kernel == "varlen":
        return by_segments(query, key, value, mask, scaling)
    if kernel == "batches":
        return by_batches(query, key, value, mask, scaling, dropout)
    if kernel == "flex":
        return by_blocks(query, key, value, mask, scaling, softcap, s_aux)
    return None


def prepared(kernels: AttentionKernels, mask: SequenceMask) -> SequenceMask:
    """Return a mask with the inputs of kernels, built once per forward and outside of compiled blocks."""
    if mask.is_described and "varlen" in kernels.usable:
        _ = mask.segments
    if "flex" in kernels.usable and ("flex" in kernels.by_path.values() or not mask.is_described):
        block_mask(mask)
    return mask


def by_documents(kernels: AttentionKernels, query: Tensor, value: Tensor, mask: SequenceMask) -> bool:
    """Return True if parts of attention, merged by their log-sum-exps, are computed within segments."""
    windowed = mask.pattern is None or mask.pattern.window is not None
    widths = query.shape[-1], value.shape[-1]
    return kernels.of(Needs(query.dtype, widths, mask.is_described, "passed", windowed=windowed)) == "varlen"


def by_segments(query: Tensor, key: Tensor, value: Tensor, mask: SequenceMask, scale: float | None) -> Tensor:
    """Attend within the segments of each chunk of queries."""
    size = query.shape[2] // len(mask.segments)
    outputs = []
    for at, (chunk, segments) in enumerate(zip(mask.layout.chunks, mask.segments, strict=True)):
        end, window = key.shape[2], (-1, -1)
        if mask.pattern is not None and mask.pattern.causal:
            end = chunk_places(mask.layout, chunk)[1]
            window = (-1 if mask.pattern.window is None else mask.pattern.window - 1, 0)
        parts = [query.narrow(2, at * size, size), key[:, :, :end], value[:, :, :end]]
        output = varlen_attention(
            *(part.transpose(1, 2).flatten(0, 1) for part in parts),
            *segments.bounds,
            window=window,
            scale=scale,
        )
        outputs.append(torch.unflatten(output, 0, (-1, size)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths differ from batch to batch
def by_batches(
    query: Tensor, key: Tensor, value: Tensor, mask: SequenceMask, scale: float | None, dropout: float
) -> Tensor:
    """Attend on batches of documents of similar length; a window beyond the longest document needs no mask."""
    causal, window = mask.pattern is None or mask.pattern.causal, None if mask.pattern is None else mask.pattern.window
    rows = [each.transpose(1, 2) for each in (query, key, value)]
    outputs = []
    for batch in mask.isolated.batches:
        length = batch.tokens.shape[1]
        seen = None
        if not causal:
            seen = torch.arange(length, device=query.device) < batch.lengths[:, None, None, None]
        elif window is not None and window < length:
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        inputs = [batch.take(each).transpose(1, 2) for each in rows]
        output = functional.scaled_dot_product_attention(
            *inputs, seen, dropout, is_causal=causal and seen is None, scale=scale, enable_gqa=_grouped(query, key)
        )
        outputs.append(output.transpose(1, 2))
    return mask.isolated.together(outputs, mask.isolated.batches)


def by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SequenceMask,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend by flex attention under a block mask; sinks rescale the output by its log-sum-exp."""

    def capped(score: Tensor, *_: Any) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    groups = query.shape[1] // key.shape[1]
    if groups & (groups - 1):  # flex attention groups by powers of two
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    output, lse = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=block_mask(mask),
        scale=scale,
        enable_gqa=_grouped(query, key),
    )
    if sinks is not None:
        kept = torch.sigmoid(lse - sinks.to(lse.dtype).view(1, -1, 1))
        output = output * kept.unsqueeze(-1).to(output.dtype)
    return output.transpose(1, 2)


def _grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]
