"""What kernels of an accelerator allocate and the traced operators do not: workspaces, and buffers on other streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

aten = torch.ops.aten

#: The kernels of attention: FlashAttention 2 (also torch's own), FlashAttention 3, or none counted.
AttentionKernels = Literal["flash2", "flash3", "none"]

_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
}
_FLOAT32 = 4
_ROWS = 128  # rows of a tile, to which both kernels round lengths up


def attention_workspace(function: Any, args: Any, kernels: AttentionKernels) -> int:
    """Return the bytes that attention's backward allocates besides its results; 0 for other operators.

    Both kernels add up the gradient of queries in float32, with one number a row for the softmax.  Where several query
    heads share a key head, FlashAttention 2 computes gradients of keys and values for every query head, and
    FlashAttention 3 adds them up in float32 (``flash_api.cpp`` of each).
    """
    if kernels == "none" or function not in _BACKWARD:
        return 0
    _, query, key, value = args[:4]
    batch, heads, tokens, dim = query.shape
    tokens, dim = -(-tokens // _ROWS) * _ROWS, -(-dim // 32) * 32
    found: int = batch * heads * tokens * (dim + 1) * _FLOAT32
    if heads != key.shape[1]:
        if kernels == "flash2":
            found += (key.numel() + value.numel()) // key.shape[1] * heads * key.element_size()
        else:
            found += (key.numel() + value.numel()) * _FLOAT32
    return found


def storages_on_streams(function: Any, args: Any) -> Iterator[tuple[Tensor, Literal["gather", "reduce"]]]:
    """Yield FSDP2's communication buffers among the arguments, which its own streams allocated."""
    name = str(function.name())
    if name.startswith("fsdp::all_gather_copy_in"):
        for tensor in (*args[0], args[1]):
            yield tensor, "gather"
    elif name.startswith(("c10d::_reduce_scatter_base", "c10d::reduce_scatter_single")):
        yield args[0], "reduce"
