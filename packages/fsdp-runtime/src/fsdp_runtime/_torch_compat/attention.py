"""Attention with its log-sum-exp, over segments and under block masks; causal masks that are not materialized."""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad
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


@cache
def varlen_operators() -> tuple[Any, Any]:
    """Return the operators of ``varlen_attn``, forward and backward; both are private."""
    import torch.nn.attention.varlen  # registers them, and takes a second

    return torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: Any,
    longest: Any,
    *,
    window: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """Attend within segments of ``[tokens, heads, dim]``, by the tokens before each and the longest segment."""
    # ``before`` and ``longest`` are of queries, then of keys. torch 2.11 takes fewer key heads without ``enable_gqa``,
    # which later releases require.
    from torch.nn.attention import varlen

    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen.varlen_attn).parameters else {}
    options |= {"scale": scale, "window_size": window}
    output = varlen.varlen_attn(query, key, _as_wide(value, query), *before, *longest, **options)
    return output[..., : value.shape[-1]]  # type: ignore[call-overload]


def varlen_part(
    query: Tensor, key: Tensor, value: Tensor, bounds: Any, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention within segments and its log-sum-exp ``[heads, tokens]``, without gradients."""
    # ``varlen_attn`` returns the log-sum-exp, but its backward takes the log-sum-exp of this part alone. The operators
    # have kept their first ten arguments from torch 2.11 to 2.14.
    window, inputs = [-1, 0 if causal else -1], (query, key, _as_wide(value, query))
    output, lse, _ = varlen_operators()[0](*inputs, *bounds[0], *bounds[1], causal, scale, window)
    return output[..., : value.shape[-1]], lse


def varlen_part_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    bounds: Any,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given output and log-sum-exp over all parts."""
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # no state of dropout
    window, (before, longest) = [-1, 0 if causal else -1], bounds
    grad_output, wide, output = (_as_wide(each, query) for each in (grad_output, value, output))
    grad_query, grad_key, grad_value = varlen_operators()[1](
        grad_output, query, key, wide, output, lse, *before, *longest, causal, random, scale, window
    )
    return grad_query, grad_key, grad_value[..., : value.shape[-1]]


def _as_wide(values: Tensor, queries: Tensor) -> Tensor:
    """Return values padded with zeros to the width of queries, which kernels require."""
    missing = queries.shape[-1] - values.shape[-1]
    return pad(values, (0, missing)) if missing else values  # padding by nothing copies


@cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention)


def flex_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return compiled flex attention and its log-sum-exp, ``[batch, heads, queries, ...]``."""
    from torch.nn.attention import flex_attention as flex

    attend = flex.flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    output, further = attend(query, key, value, return_aux=flex.AuxRequest(lse=True), **options)
    return output, further.lse
