"""Parts of attention add up to attention, and their gradients to its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fsdp_runtime.steps.context.ring import Block, add_part, attend, attend_backward

QUERIES, KEYS, HEADS, KV_HEADS, DIM, SCALE = 6, 10, 4, 2, 8, 0.3


def _tensors(value_dim: int = DIM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, QUERIES, DIM), (KV_HEADS, KEYS, DIM), (KV_HEADS, KEYS, value_dim), (HEADS, QUERIES, value_dim))
    return [torch.randn(2, *shape, dtype=torch.float64, generator=generator) for shape in shapes]


def _in_parts(blocks: list[Block], value_dim: int = DIM) -> list[Tensor]:
    """Output and gradients, part by part."""
    query, key, value, grad_output = _tensors(value_dim)
    output, lse = torch.zeros_like(grad_output), query.new_full(query.shape[:3], float("-inf"))
    for block in blocks:
        q, k = block.queries, block.keys
        part = attend(query[:, :, q], key[:, :, k], value[:, :, k], block, SCALE)
        add_part(output[:, :, q], lse[:, :, q], *part)
    gradients = [torch.zeros_like(each) for each in (query, key, value)]
    for block in blocks:
        q, k = block.queries, block.keys
        known = output[:, :, q], lse[:, :, q]
        parts = attend_backward(
            grad_output[:, :, q], query[:, :, q], key[:, :, k], value[:, :, k], *known, block, SCALE
        )
        for gradient, part, places in zip(gradients, parts, (q, k, k), strict=True):
            gradient[:, :, places] += part
    return [output, *gradients]


def _at_once(mask: Tensor | None, value_dim: int = DIM) -> list[Tensor]:
    *inputs, grad_output = _tensors(value_dim)
    leaves = [each.requires_grad_() for each in inputs]
    output = scaled_dot_product_attention(*leaves, attn_mask=mask, scale=SCALE, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


def _assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_parts_over_keys_add_up(fused: bool) -> None:
    keys = (slice(0, 3), slice(3, 4), slice(4, KEYS))
    _assert_equal(_in_parts([Block(slice(0, QUERIES), each, fused=fused) for each in keys]), _at_once(None))


@pytest.mark.parametrize("fused", [True, False])
def test_the_same_tokens_are_seen_up_to_ones_own(fused: bool) -> None:
    queries = slice(0, QUERIES)
    blocks = [
        Block(queries, slice(0, QUERIES), causal=True, fused=fused),
        Block(queries, slice(QUERIES, KEYS), fused=fused),
    ]
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    mask[:, :QUERIES].tril_()
    _assert_equal(_in_parts(blocks), _at_once(mask))


def test_masked_parts_and_values_of_another_width_add_up() -> None:
    mask = torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = True
    tiles = [(slice(a, a + 3), slice(b, b + 5)) for a in (0, 3) for b in (0, 5)]
    blocks = [Block(q, k, mask=mask[..., q, k]) for q, k in tiles]
    _assert_equal(_in_parts(blocks, value_dim=3), _at_once(mask, value_dim=3))


def test_a_query_that_sees_nothing_has_output_and_gradients_of_zero() -> None:
    mask = torch.ones(2, 1, QUERIES, KEYS, dtype=torch.bool)
    mask[:, :, 2] = False
    output, grad_query, *others = _in_parts([Block(slice(0, QUERIES), slice(0, KEYS), mask=mask)])
    assert not output[:, :, 2].any()
    assert not grad_query[:, :, 2].any()
    assert all(each.isfinite().all() for each in (output, *others))
