"""Attention with its log-sum-exp, and causal masks that are not materialized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes


def has_flash_attention(query: Tensor, value: Tensor) -> bool:
    """Return True if :func:`flash_attention` computes attention of this dtype and width."""
    # No public function of torch returns the log-sum-exp of attention and takes it back in backward; torch's own ring
    # attention calls these operators, which have kept their signatures from torch 2.11 to 2.15.
    width = query.shape[-1]
    if value.shape[-1] != width:
        return False
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cpu":
        return half or query.dtype in (torch.float32, torch.float64)
    return query.device.type == "cuda" and half and width % 8 == 0 and width <= 256


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention ``[batch, heads, queries, dim]`` and its log-sum-exp ``[batch, heads, queries]``."""
    operator = _flash_operators(query)[0]
    output, lse, *_ = operator(query, key, value, 0.0, causal, scale=scale)
    return output, lse


def flash_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given output and log-sum-exp over all keys."""
    operator = _flash_operators(query)[1]
    lse = lse.contiguous()
    varlen: tuple[Any, ...] = ()
    random: tuple[Any, ...] = ()
    if query.device.type == "cuda":  # no packed lengths, and no state of dropout
        varlen = (None, None, query.shape[2], key.shape[2])
        random = (torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_zeros(0, dtype=torch.uint64))
    grads: tuple[Tensor, Tensor, Tensor] = operator(
        grad_output, query, key, value, output, lse, *varlen, 0.0, causal, *random, scale=scale
    )
    return grads


def _flash_operators(query: Tensor) -> tuple[Any, Any]:
    aten = torch.ops.aten
    if query.device.type == "cpu":
        return (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        )
    return aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward


def causal_bias(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal mask of the last ``queries`` of ``keys`` tokens, in a form that kernels do not materialize."""
    # torch 2.11 to 2.15 cannot make a ``CausalBias`` inside a dispatch mode, such as selective checkpointing, and
    # compiles it only with a graph break (no upstream issue found); there the mask is an ordinary tensor.
    if torch.compiler.is_compiling():
        return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    with _disable_current_modes():
        return causal_lower_right(queries, keys)
