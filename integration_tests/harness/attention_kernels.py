"""Stand-ins for the attention kernels of an accelerator: the same results on a CPU, document by document, counted.

torch's ``varlen_attn`` itself runs, with its checks, shapes and backward.  Its two operators get a kernel for the CPU.
The kernel computes each segment alone in float64.  Flex attention is computed from its block mask and its functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention import varlen

from fsdp_runtime.steps.attention import kernels


@dataclass
class KernelCalls:
    """What the kernels were called for."""

    varlen: int = 0
    flex: int = 0
    scores: int = 0  # products of a query and a key, per head
    bounds: list[tuple[int, int]] = field(default_factory=list)


CALLS = KernelCalls()


def _segments(before_queries: Tensor, before_keys: Tensor) -> Iterator[tuple[slice, slice]]:
    for at in range(len(before_queries) - 1):
        yield (
            slice(int(before_queries[at]), int(before_queries[at + 1])),
            slice(int(before_keys[at]), int(before_keys[at + 1])),
        )


def _weights(query: Tensor, key: Tensor, window: list[int], scale: float) -> Tensor:
    """The scores of one segment ``[heads, queries, keys]``, aligned at the last tokens."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    places = torch.arange(len(query))[:, None] + len(key) - len(query)
    distance = places - torch.arange(len(key))
    left, right = window
    seen = ((distance <= left) | torch.tensor(left < 0)) & ((-distance <= right) | torch.tensor(right < 0))
    return scores.masked_fill(~seen, float("-inf"))


def _heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.double().repeat_interleave(heads // tensor.shape[1], dim=1)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    window = window_size or [-1, -1]
    assert is_causal == (window == [-1, 0])
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_k[-1]) == len(key) == len(value)
    heads, factor = query.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
    output = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full((heads, len(query)), float("inf"), dtype=torch.float64)  # the kernel's value for no keys
    CALLS.varlen += 1
    CALLS.bounds.append((max_q, max_k))
    for of_queries, of_keys in _segments(cu_seq_q, cu_seq_k):
        q, k, v = query[of_queries].double(), _heads(key[of_keys], heads), _heads(value[of_keys], heads)
        assert len(q) <= max_q
        assert len(k) <= max_k
        CALLS.scores += heads * len(q) * len(k)
        if not len(q) or not len(k):
            continue
        scores = _weights(q, k, window, factor)
        output[of_queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v)
        lse[:, of_queries] = scores.logsumexp(-1)
    exact = query.dtype == torch.float64
    return output.to(query.dtype), lse if exact else lse.float(), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor,
    cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool, rng_state: Tensor, scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    window, heads = window_size or [-1, -1], query.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    gradients = [torch.zeros(each.shape, dtype=torch.float64) for each in (query, key, value)]
    for of_queries, of_keys in _segments(cu_seq_q, cu_seq_k):
        q, k, v = query[of_queries].double(), _heads(key[of_keys], heads), _heads(value[of_keys], heads)
        if not len(q) or not len(k):
            continue
        gradient, outputs = grad_out[of_queries].double(), out[of_queries].double()
        weights = (_weights(q, k, window, factor) - lse[:, of_queries].double().unsqueeze(-1)).exp()
        inner = (gradient * outputs).sum(-1).T.unsqueeze(-1)
        of_scores = weights * (torch.einsum("qhd,khd->hqk", gradient, v) - inner) * factor
        gradients[0][of_queries] = torch.einsum("hqk,khd->qhd", of_scores, k)
        for place, of_heads in ((1, torch.einsum("hqk,qhd->khd", of_scores, q)),
                                (2, torch.einsum("hqk,qhd->khd", weights, gradient))):  # fmt: skip
            grouped = of_heads.unflatten(1, (key.shape[1], -1)).sum(2)
            gradients[place][of_keys] = grouped
    query_gradient, key_gradient, value_gradient = (
        gradient.to(each.dtype) for gradient, each in zip(gradients, (query, key, value), strict=True)
    )
    return query_gradient, key_gradient, value_gradient


varlen._varlen_attn.register_kernel("cpu")(_forward)
varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _flex(
    query: Tensor, key: Tensor, value: Tensor, *, score_mod: Any, block_mask: flex.BlockMask, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention under the blocks that a block mask lists, and under its function in its partial blocks."""
    signature(flex.flex_attention).bind(query, key, value, score_mod=score_mod, block_mask=block_mask, **options)
    CALLS.flex += 1
    heads, shape = query.shape[1], (query.shape[0], 1, query.shape[2], key.shape[2])
    seen = torch.zeros(shape, dtype=torch.bool)
    allowed = flex.create_mask(block_mask.mask_mod, *shape, device="cpu")
    lists = ((block_mask.kv_num_blocks, block_mask.kv_indices, allowed),
             (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, torch.ones_like(allowed)))  # fmt: skip
    for counts, places, within in lists:
        assert counts is not None
        assert places is not None
        for batch, row in ((b, r) for b in range(counts.shape[0]) for r in range(counts.shape[2])):
            for column in places[batch, 0, row, : counts[batch, 0, row]].tolist():
                block = batch, 0, slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
                seen[block] = within[block]
                CALLS.scores += heads * seen[block].numel()
    scores = query @ _heads_of(key, heads).transpose(-1, -2) * (options["scale"] or query.shape[-1] ** -0.5)
    scores = scores if score_mod is None else score_mod(scores, 0, 0, 0, 0)
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num() @ _heads_of(value, heads), scores.logsumexp(-1)


def _heads_of(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


@contextmanager
def accelerated(*, without: tuple[str, ...] = ()) -> Iterator[KernelCalls]:
    """Decide about attention as on an accelerator whose kernels also take float64, except for kernels that fail."""
    CALLS.__init__()  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "HALF", (torch.float16, torch.bfloat16, torch.float64))
        patch.setattr(kernels, "_ALIGNED", 1)
        patch.setattr(kernels, "is_accelerated", lambda _: True)
        patch.setattr(kernels, "flex_attention", _fails if "flex" in without else _flex)
        if "varlen" in without:
            patch.setattr(kernels, "varlen_attention", _fails)
        yield CALLS


def _fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no kernel image is available for execution on the device")
