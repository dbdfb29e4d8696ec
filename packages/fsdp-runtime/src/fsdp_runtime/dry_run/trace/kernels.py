"""Costs of operators on an accelerator: operations and bytes moved, workspaces.

Operations are counted by torch's formulas, and by our own formulas for operators that torch lacks.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fsdp_runtime._torch_compat import storage_key, tree_leaves, varlen_operators

aten = torch.ops.aten

#: The kernels of attention: FlashAttention 2 (also torch's own), FlashAttention 3, or none counted.
AttentionKernels = Literal["flash2", "flash3", "none"]

_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}
_FLOAT32 = 4
_ROWS = 128  # rows of a tile, to which both kernels round lengths up


def workspace_of(function: Any, args: Any, kernels: AttentionKernels) -> int:
    """Return the bytes that backward of attention or of an embedding allocates besides its results; 0 for others."""
    if function is aten.embedding_dense_backward.default:
        # Float32 sums of at most ten rows of one token (``EmbeddingBackwardKernel.cu``).
        gradient, tokens, rows = args[0], args[1].numel(), args[2]
        return int((tokens // 10 + min(tokens, rows)) * gradient.shape[-1] * _FLOAT32)
    # Both kernels add up the gradient of queries in float32, with one number a row for the softmax. Where several query
    # heads share a key head, FlashAttention 2 computes gradients of keys and values for every query head, and
    # FlashAttention 3 adds them up in float32 (``flash_api.cpp`` of each).
    of_segments = function.overloadpacket is varlen_operators()[1]
    if kernels == "none" or (function not in _BACKWARD and not of_segments):
        return 0
    _, query, key, value = args[:4]
    if of_segments:  # ``[tokens, heads, dim]``
        query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    batch, heads, tokens, dim = query.shape
    tokens, dim = -(-tokens // _ROWS) * _ROWS, -(-dim // 32) * 32
    nbytes: int = batch * heads * tokens * (dim + 1) * _FLOAT32
    if heads != key.shape[1]:
        if kernels == "flash2":
            nbytes += (key.numel() + value.numel()) // key.shape[1] * heads * key.element_size()
        else:
            nbytes += (key.numel() + value.numel()) * _FLOAT32
    return nbytes


def flops_of(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the operations of one call, a multiply-add counted as two; 0 for operators that only copy or add."""
    # Causal attention counts as full attention, as in ``torch.utils.flop_counter``.
    packet = function.overloadpacket
    if packet in varlen_operators():
        return varlen_flops(packet, args)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*_of_query_heads(*args[:3])))  # type: ignore[no-untyped-call]
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(args[0].shape, *_of_query_heads(*args[1:4])))  # type: ignore[no-untyped-call]
    if "grouped_mm" in _name_of(packet) and getattr(args[0], "ndim", 0) == 2:
        products = 2 if "backward" in _name_of(packet) else 1  # transformers' operator computes both gradients
        return 2 * products * int(args[0].numel() * args[1].shape[-1])
    if packet is torch.ops.aten._scaled_mm_v2:  # torch counts the first version only
        return 2 * int(args[0].numel() * args[1].shape[-1])
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


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


def kind_of(function: Any) -> str:
    """Return the kind of an operator's operations: ``"attention"``, ``"grouped"``, ``"float8"`` or ``"matmul"``."""
    name = _name_of(function.overloadpacket)
    if "attention" in name or "varlen_attn" in name:
        return "attention"
    return "grouped" if "grouped_mm" in name else "float8" if "scaled_mm" in name else "matmul"


@cache  # torch builds the text at each call
def _name_of(packet: Any) -> str:
    return str(packet)


def bytes_moved(args: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes at least, 0 for views."""
    read = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    known = {storage_key(leaf) for leaf in read}
    if all(storage_key(leaf) in known for leaf in written):
        return 0
    return sum(leaf.nbytes for leaf in (*read, *written))


def _of_query_heads(query: Tensor, key: Tensor, value: Tensor) -> list[torch.Size]:
    """Return the shapes with as many key/value heads as query heads: torch 2.11's formulas need equal numbers."""
    return [torch.Size((tensor.shape[0], query.shape[1], *tensor.shape[2:])) for tensor in (query, key, value)]
