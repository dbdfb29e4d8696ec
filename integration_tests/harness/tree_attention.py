"""The attention of TRL's asynchronous trainers over a tree of prefixes, without its kernel, which wants a GPU."""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def attend_without_a_kernel() -> None:
    """Let TRL's tree attention call :func:`attention` in the place of its kernel."""
    packing = importlib.import_module("trl.experimental.async_grpo.packing")
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    *_: Any,
    softmax_scale: float,
    window_size: tuple[int, int] = (-1, -1),
    **__: Any,
) -> Tensor:
    """Attend of each segment to its path, causal; the arguments are those of the kernel."""
    found = []
    ways = query.shape[1] // key.shape[1]
    for (a, b), (c, d) in zip(_pairs(starts), _pairs(key_starts), strict=True):
        keys, values = (each[c:d].repeat_interleave(ways, dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[a:b], keys) * softmax_scale
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)[None, :]
        later = (distance < 0) | ((distance > window_size[0]) if window_size[0] >= 0 else False)
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), values))
    return torch.cat(found)


def _pairs(starts: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(starts.tolist()))
