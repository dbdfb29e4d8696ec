"""Norms and clipping by Triton's kernels over a table of chunks (nox -s triton)."""

import math

import pytest
import torch

import rl_logprobs
from rl_logprobs.norms import chunk_table
from rl_logprobs.norms.grad_norm import clip_grads_with_norm_

SHAPES = [(100,), (7, 9), (64,), (0,), (300,), (8, 8), (1,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16, torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(chunk_table, "CHUNK", 64)
    monkeypatch.setattr(chunk_table, "BLOCK", 16)


def parameters(scale=1.0):
    generator, found = torch.Generator().manual_seed(0), []
    for shape, dtype in zip(SHAPES, DTYPES, strict=True):
        dtype = torch.float32 if dtype is torch.float16 and scale != 1 else dtype  # of a small range
        gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        if shape == (7, 9):
            gradient = gradient.t().contiguous().t()
        if shape == (8, 8):
            gradient = torch.empty(16, 8)[::2].copy_(gradient)
        found.append(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        found[-1].grad = gradient
    return found


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, 0.5, math.inf])
@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-25, 1e-18])
def test_norms_are_those_of_float64_at_any_magnitude(scale, order):
    all_parameters = parameters(scale)
    flat = torch.cat([parameter.grad.double().flatten() for parameter in all_parameters])
    largest = flat.abs().max()
    expected = largest * torch.linalg.vector_norm(flat / largest, order)
    torch.testing.assert_close(rl_logprobs.grad_norm(all_parameters, order), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_norms_keep_infinity_and_nan(order, value):
    all_parameters = parameters()
    all_parameters[0].grad[70] = value
    torch.testing.assert_close(rl_logprobs.grad_norm(all_parameters, order).item(), value, equal_nan=True)


def test_a_factor_below_one_scales_and_another_touches_nothing():
    all_parameters = parameters()
    before = [parameter.grad.clone() for parameter in all_parameters]
    clip_grads_with_norm_(all_parameters, 1.0, torch.tensor(0.5))
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(all_parameters, before, strict=True))
    clip_grads_with_norm_(all_parameters, 1.0, torch.tensor(3.0))
    for parameter, gradient in zip(all_parameters, before, strict=True):
        # Triton's interpreter truncates to bfloat16, where a GPU rounds.
        rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(gradient.dtype, 2e-7)
        expected = (gradient.double() / (3 + 1e-6)).to(gradient.dtype)
        torch.testing.assert_close(parameter.grad, expected, rtol=rounding, atol=0)
    clip_grads_with_norm_(all_parameters, 1.0, torch.tensor(math.nan))
    assert all(parameter.grad.isnan().all() for parameter in all_parameters)


def test_a_table_is_made_once_for_addresses():
    all_parameters = parameters()
    rl_logprobs.grad_norm(all_parameters)
    tables = len(chunk_table._tables)
    rl_logprobs.grad_norm(all_parameters)
    assert len(chunk_table._tables) == tables
