"""Contenders of ``--bench`` for causal attention over packed rows: functions of queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fsdp_runtime.gpu_check.bench_peers import Contender
from fsdp_runtime.gpu_check.machine import optional


def attention_contenders(number: int, length: int, device: torch.device) -> list[Contender]:
    """Return functions of ``[1, heads, number * length, head size]`` tensors, for documents of one length."""
    total = number * length
    documents = torch.arange(total, device=device) // length
    boundaries = torch.arange(0, total + 1, length, dtype=torch.int32, device=device)

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = (documents[:, None] == documents) & torch.ones(total, total, dtype=torch.bool, device=device).tril()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def batched(*rows: Tensor) -> Tensor:
        parts = [row[0].unflatten(1, (number, length)).transpose(0, 1) for row in rows]
        return F.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1).flatten(1, 2)[None]

    contenders = [Contender("sdpa with a mask", masked), Contender("sdpa on a batch of the documents", batched)]
    if device.type == "cpu":
        return contenders
    flex, varlen, flash = (
        optional(name) for name in ("torch.nn.attention.flex_attention", "torch.nn.attention.varlen", "flash_attn")
    )

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[query] == documents[key]) & (query >= key)

    block_mask = flex.create_block_mask(same_document, None, None, total, total, device=device)
    compiled = torch.compile(flex.flex_attention)
    contenders.append(Contender("compiled flex, block mask", lambda *rows: compiled(*rows, block_mask=block_mask)))
    flat = (boundaries, boundaries, length, length)
    if varlen is not None:
        contenders.append(
            Contender("torch varlen_attn", _flat(lambda *rows: varlen.varlen_attn(*rows, *flat, window_size=(-1, 0))))
        )
    if flash is not None:
        contenders.append(
            Contender("flash_attn", _flat(lambda *rows: flash.flash_attn_varlen_func(*rows, *flat, causal=True)))
        )
    return contenders


def _flat(attend: Any) -> Callable[..., Tensor]:
    """Return a function of rows for a kernel of ``[tokens, heads, head size]``."""
    return lambda *rows: attend(*(row[0].transpose(0, 1) for row in rows)).transpose(0, 1)[None]


def exact_attention(number: int, rows: list[Tensor]) -> Tensor:
    """Return the attention of each document alone, in float64."""
    documents = zip(*(row.detach().double().chunk(number, 2) for row in rows), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*document, is_causal=True) for document in documents], 2)
