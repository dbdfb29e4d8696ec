"""Contenders of ``--bench`` for causal attention over packed rows: functions of queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime.gpu_check.bench_peers import Contender
from fsdp_runtime.gpu_check.machine import optional

_sdpa: Any = torch.nn.functional.scaled_dot_product_attention


def attention_contenders(number: int, length: int, device: torch.device) -> list[Contender]:
    """Return functions of ``[1, heads, number * length, head size]`` tensors, for documents of one length."""
    tokens = torch.arange(number * length, device=device)
    mask = (tokens[:, None] // length == tokens // length) & (tokens[:, None] >= tokens)

    def masked(*rows: Tensor) -> Tensor:
        return _sdpa(*rows, attn_mask=mask)  # type: ignore[no-any-return]

    def batched(*rows: Tensor) -> Tensor:
        parts = [row[0].reshape(-1, number, length, row.shape[-1]).transpose(0, 1) for row in rows]
        return _sdpa(*parts, is_causal=True).transpose(0, 1).flatten(1, 2)[None]  # type: ignore[no-any-return]

    contenders = [Contender("sdpa with a mask", masked), Contender("sdpa on a batch of the documents", batched)]
    return contenders if device.type == "cpu" else contenders + kernels(number, length, device)


def kernels(number: int, length: int, device: torch.device) -> list[Contender]:
    """Return the installed kernels that take the boundaries of documents."""
    total = number * length
    ends = torch.arange(0, total + 1, length, dtype=torch.int32, device=device)
    flex: Any = optional("torch.nn.attention.flex_attention")
    attend: Any = torch.compile(flex.flex_attention, dynamic=False)

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query // length == key // length) & (query >= key)

    @cache  # at the first call, where an error is a row's
    def block_mask() -> Any:
        return flex.create_block_mask(allowed, None, None, total, total, device=device)

    contenders = [Contender("compiled flex, block mask", lambda *rows: attend(*rows, block_mask=block_mask()))]
    for module, name, causal in (
        ("torch.nn.attention.varlen", "varlen_attn", {"window_size": (-1, 0)}),
        ("flash_attn", "flash_attn_varlen_func", {"causal": True}),
        ("flash_attn_interface", "flash_attn_varlen_func", {"causal": True}),
    ):
        if installed := optional(module):
            contenders.append(Contender(f"{module}.{name}", _flat(getattr(installed, name), ends, length, causal)))
    return contenders


def _flat(attend: Any, ends: Tensor, length: int, causal: dict[str, Any]) -> Callable[..., Tensor]:
    """Return a function of rows for a kernel of ``[tokens, heads, head size]``."""

    def call(*rows: Tensor) -> Tensor:
        output = attend(*(row[0].transpose(0, 1) for row in rows), ends, ends, length, length, **causal)
        output = output[0] if isinstance(output, tuple) else output  # FlashAttention 3 may add the log-sum-exp
        return output.transpose(0, 1)[None]  # type: ignore[no-any-return]

    return call


def exact_attention(number: int, rows: list[Tensor]) -> Tensor:
    """Return the attention of each document alone, in float64."""
    documents = zip(*(row.detach().double().chunk(number, 2) for row in rows), strict=True)
    return torch.cat([_sdpa(*document, is_causal=True) for document in documents], 2)
