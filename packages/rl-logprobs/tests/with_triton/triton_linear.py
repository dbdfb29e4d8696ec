"""The Triton kernels on tiles of an LM head against torch's operators (nox -s triton)."""

import math

import pytest
import torch

import rl_logprobs
from rl_logprobs import VocabShard
from rl_logprobs.softmax import fused_linear, triton_backend

TOKENS, FEATURES, VOCABULARY = 7, 6, 29
OPTIONS = {
    "plain": {},
    "head": {"softcap": 3.0, "logit_scale": 0.5, "temperature": 0.7},
    "padded": {"softcap": 2.0, "shard": VocabShard(27)},
    "per token": {"temperature": torch.linspace(0.5, 2.0, TOKENS)},
}
#: Rounding of results of a dtype; sums over tiles are rounded in another order.
ROUNDING = {torch.float64: (1e-11, 1e-11), torch.float32: (5e-6, 8e-6), torch.bfloat16: (2**-7, 8e-6)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(fused_linear, "ACCELERATOR_TILE", (4, 8))
    monkeypatch.setattr(triton_backend, "LANES", 8)


def operands(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, FEATURES), (VOCABULARY, FEATURES), (VOCABULARY,)
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    hidden[1] = math.nan  # of an ignored token
    return hidden, weight, bias


def results(dtype, statistic, given, *, bias):
    hidden, weight, offset = operands(dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(statistic != "frozen")]
    if bias:
        leaves.append(offset.requires_grad_(statistic != "frozen"))
    targets = torch.tensor([3, -100, 26, 0, 8, 15, 7])
    options = {"entropy": statistic == "entropy", "argmax": True, "bias": offset if bias else None}
    found = rl_logprobs.linear_token_statistics(hidden, weight, targets, **options, **given)
    loss = found.logprobs * 3 + found.logsumexp.square() * 0.1 + (0 if found.entropy is None else found.entropy)
    loss.sum().backward()
    return [*found, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("statistic", ["log-probabilities", "entropy", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tiles_of_a_head_give_what_torch_gives(monkeypatch, dtype, statistic, name, bias):
    monkeypatch.setenv("RL_LOGPROBS_BACKEND", "torch")
    expected = results(dtype, statistic, OPTIONS[name], bias=bias)
    monkeypatch.setenv("RL_LOGPROBS_BACKEND", "triton")
    for actual, desired in zip(results(dtype, statistic, OPTIONS[name], bias=bias), expected, strict=True):
        assert (actual is None) == (desired is None)
        if actual is not None:
            rtol, atol = ROUNDING.get(actual.dtype, (0, 0))
            torch.testing.assert_close(actual, desired, rtol=rtol, atol=atol)
