"""Attention as an accelerator computes it, where torch on a CPU would hold matrices of scores, and its operations.

``scaled_dot_product_attention`` holds no scores on CUDA where values are narrower than queries, as in latent
attention, or where weights are dropped: its memory-efficient kernel and cuDNN's take both.  On a CPU it computes
products and a softmax of all scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias

from fsdp_runtime._torch_compat import varlen_operators

#: The memory-efficient kernel takes multiples of this number of features per head.
_ALIGNED = 8


@contextmanager
def kernels_of_attention() -> Iterator[None]:
    """Let attention run the memory-efficient kernel where an accelerator would call it and a CPU has none."""
    varlen_operators()  # loaded before tensors are fake
    # A mode for functions of torch would not reach recomputation: ``Tensor.backward`` leaves it.
    original: Any = functional.scaled_dot_product_attention

    @wraps(original)
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        output = _efficient(*args, **kwargs)
        return original(*args, **kwargs) if output is None else output

    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def varlen_flops(packet: Any, args: Any) -> int:
    """Return the operations of attention over segments, as if each were as long as the longest."""
    # Segments of a dry run are rows, or a chunk of each row. torch's formula reads the lengths, which are data there. A
    # window's scores are counted twice: the caller halves all counts for the masked part of a causal mask.
    backward = packet is varlen_operators()[1]
    query, value = (args[1], args[3]) if backward else (args[0], args[2])
    before, (queries, keys) = (args[6], args[8:10]) if backward else (args[3], args[5:7])
    window = args[13] if backward else args[9]
    seen = min(keys, 2 * (window[0] + 1)) if window and window[0] >= 0 else keys
    pairs = (len(before) - 1) * min(queries, len(query)) * seen * query.shape[1]
    width, of_values = query.shape[-1], value.shape[-1]
    return int(2 * pairs * (3 * width + 2 * of_values if backward else width + of_values))


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return attention of the memory-efficient kernel, ``None`` if torch's choice is the same on a CPU."""
    widths = query.shape[-1], value.shape[-1]
    is_taken = query.ndim == 4 and not enable_gqa and not any(width % _ALIGNED for width in widths)
    if not is_taken or (widths[0] == widths[1] and not dropout_p):
        return None
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = None, True  # it holds no mask there
    elif attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    with_gradients = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    output: Tensor = kernel(query, key, value, attn_mask, with_gradients, dropout_p, is_causal, scale=scale)[0]
    return output
