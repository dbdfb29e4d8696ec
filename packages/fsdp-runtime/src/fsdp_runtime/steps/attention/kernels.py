"""Attention under a :class:`SequenceMask` by the kernel that the model's decision names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fsdp_runtime._torch_compat import varlen_attention
from fsdp_runtime.steps.attention.block_masks import attend_in_blocks, block_mask
from fsdp_runtime.steps.attention.decision import AttentionKernels, Keys, Needs
from fsdp_runtime.steps.context.masks import SequenceMask


def kernel_of(
    kernels: AttentionKernels, query: Tensor, value: Tensor, mask: SequenceMask, keys: Keys, **options: Any
) -> str:
    """Return the kernel of one call, by its tensors and the keywords of an attention function."""
    return kernels.of(
        Needs(
            dtype=query.dtype,
            widths=(query.shape[-1], value.shape[-1]),
            keys=keys,
            pattern=mask.pattern,
            changes_scores=options.get("softcap") is not None or options.get("s_aux") is not None,
            biased=options.get("position_bias") is not None,
            dropout=options.get("dropout", 0.0) > 0,
        )
    )


def attend(
    kernels: AttentionKernels, query: Tensor, key: Tensor, value: Tensor, mask: SequenceMask, **options: Any
) -> Tensor | None:
    """Return attention ``[batch, queries, heads, value_dim]``, ``None`` where only the full mask describes it."""
    if torch.is_autocast_enabled(device := query.device.type):  # as for scaled_dot_product_attention
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    kernel = kernel_of(kernels, query, value, mask, "rows" if mask.layout.ranks == 1 else "gathered", **options)
    scale = options.get("scaling")
    if kernel == "varlen":
        return attend_in_segments(query, key, value, mask, scale)
    if kernel == "batches":
        output: Tensor = attend_in_batches(query, key, value, mask, scale, options.get("dropout", 0.0))
        return output
    if kernel == "flex":
        return attend_in_blocks(query, key, value, mask, scale, options.get("softcap"), options.get("s_aux"))
    return None


def prepared(kernels: AttentionKernels, mask: SequenceMask) -> SequenceMask:
    """Return a mask with the inputs of kernels, built once per forward and outside of compiled blocks."""
    if mask.pattern is not None and "varlen" in kernels.usable:
        _ = mask.segments
    if "flex" in kernels.usable and ("flex" in kernels.by_path.values() or mask.pattern is None):
        block_mask(mask)
    return mask


def attend_in_segments(query: Tensor, key: Tensor, value: Tensor, mask: SequenceMask, scale: float | None) -> Tensor:
    """Attend within the documents of each chunk of queries."""
    size = query.shape[2] // len(mask.segments)
    outputs = []
    for at, segments in enumerate(mask.segments):
        parts = [query.narrow(2, at * size, size), *(each[:, :, : segments.keys_at_hand] for each in (key, value))]
        flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        output = varlen_attention(flat[0], flat[1], flat[2], *segments.bounds, window=mask.window, scale=scale)
        outputs.append(torch.unflatten(output, 0, (-1, size)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths differ from batch to batch
def attend_in_batches(
    query: Tensor, key: Tensor, value: Tensor, mask: SequenceMask, scale: float | None, dropout: float
) -> Tensor:
    """Attend on batches of documents of similar length under a causal mask; padding is at their ends."""
    outputs: list[Tensor] = []
    attend_alone: Any = scaled_dot_product_attention
    groups = query.shape[1] // key.shape[1]  # of CUDA's kernels only FlashAttention takes fewer key heads
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    for batch in mask.isolated.batches:
        inputs = [batch.take(each.transpose(1, 2)).transpose(1, 2) for each in (query, key, value)]
        output = attend_alone(*inputs, dropout_p=dropout, is_causal=True, scale=scale)
        outputs.append(output.transpose(1, 2))
    return mask.isolated.together(outputs, mask.isolated.batches)
