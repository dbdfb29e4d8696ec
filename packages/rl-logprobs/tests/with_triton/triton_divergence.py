"""Divergences by Triton's kernels against torch's operators: logits, heads and mixed sides (nox -s triton)."""

import math

import pytest
import torch

import rl_logprobs
from rl_logprobs import LinearLogits, VocabShard
from rl_logprobs.softmax import fused_linear, triton_backend

TOKENS, VOCABULARY = (2, 3), 29


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(fused_linear, "ACCELERATOR_TILE", (4, 8))
    monkeypatch.setattr(triton_backend, "LANES", 8)


def sides(kinds, dtype, infinite):
    """Student and teacher with their leaves."""
    generator, found, leaves = torch.Generator().manual_seed(0), [], []
    for kind, features in zip(kinds, (6, 4), strict=True):
        shape = (*TOKENS, VOCABULARY if kind == "logits" else features)
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).to(dtype)]
        if kind == "logits":
            tensors[0][0, 0, :9] = -math.inf if infinite else -50.0  # a tile has nothing
            tensors[0][1, 2] = math.nan  # of a token that does not count
            found.append(tensors[0].requires_grad_())
        else:
            tensors += [torch.randn(VOCABULARY, features, generator=generator, dtype=torch.float64).to(dtype)]
            tensors += [torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)]
            tensors[0][1, 2] = math.nan
            leaf = [tensor.requires_grad_() for tensor in tensors]
            found.append(LinearLogits(*leaf, softcap=4.0, logit_scale=0.5))
        leaves += tensors
    return found, leaves


def results(kinds, dtype, beta, infinite=False, **options):
    (student, teacher), leaves = sides(kinds, dtype, infinite)
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[1, 2] = False
    found = rl_logprobs.token_divergence(student, teacher, beta=beta, mask=mask, **options)
    (found * torch.arange(1.0, 7).view(TOKENS)).nan_to_num(posinf=0.0).sum().backward()
    return [found, *(leaf.grad for leaf in leaves)]


OPTIONS = [{"infinite": True}, {"temperature": 0.7, "teacher_temperature": torch.linspace(0.5, 2.0, 6).view(TOKENS)}]


@pytest.mark.parametrize("options", OPTIONS, ids=["infinite", "temperatures"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kinds", [("logits", "logits"), ("head", "head"), ("head", "logits"), ("logits", "head")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_divergences_give_what_torch_gives(monkeypatch, dtype, kinds, beta, options):
    monkeypatch.setenv("RL_LOGPROBS_BACKEND", "torch")
    expected = results(kinds, dtype, beta, **options)
    monkeypatch.setenv("RL_LOGPROBS_BACKEND", "triton")
    for actual, desired in zip(results(kinds, dtype, beta, **options), expected, strict=True):
        assert (actual is None) == (desired is None)
        if actual is not None:
            rtol, atol = (1e-11, 1e-11) if actual.dtype is torch.float64 else (2**-7, 2e-5)
            # An infinite divergence has no gradient.
            torch.testing.assert_close(actual, desired, rtol=rtol, atol=atol, equal_nan=True)


def test_the_divergence_of_padded_strided_logits_is_that_of_torch(monkeypatch):
    generator, gradients = torch.Generator().manual_seed(0), []
    policy, reference = (torch.randn(2, 4, VOCABULARY, generator=generator) for _ in range(2))
    for backend in ("torch", "triton"):
        monkeypatch.setenv("RL_LOGPROBS_BACKEND", backend)
        leaf = policy.clone().requires_grad_()
        found = rl_logprobs.token_kl(leaf[:, :-1], reference[:, 1:], shard=VocabShard(27))
        found.sum().backward()
        gradients.append((found, leaf.grad))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=5e-6, atol=2e-6)
