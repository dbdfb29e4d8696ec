"""The Triton kernels on rows of several blocks; that they do what torch does, the other tests say (nox -s triton)."""

import math

import pytest
import torch

from rl_logprobs import VocabShard, token_statistics
from rl_logprobs.softmax import triton_backend


def statistics_and_gradient(logits, targets, backend, **options):
    leaf = logits.clone().requires_grad_()
    found = token_statistics(
        leaf * 1.0, targets, argmax=True, target_rank=True, temperature=0.8, backend=backend, **options
    )
    loss = found.logprobs * 3 + found.logsumexp.square() * 0.1
    loss = loss if found.entropy is None else loss + found.entropy
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return [found.logprobs, found.logsumexp, found.argmax, found.target_rank, gradient] + (
        [] if found.entropy is None else [found.entropy]
    )


@pytest.mark.parametrize("options", [{"entropy": True}, {"inplace_backward": True}, {"inplace_forward": True}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_rows_of_several_blocks_give_what_torch_gives(monkeypatch, dtype, options):
    monkeypatch.setattr(triton_backend, "LANES", 8)
    monkeypatch.setattr(triton_backend, "LARGEST_BLOCK", 16)
    logits = (
        torch.randn(5, 57, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(6).round().to(dtype)
    )
    logits[0, :40] = -math.inf  # the first two blocks have nothing
    logits[1, 40:] = -math.inf
    logits[2] = torch.linspace(-1e4, 1e4, 57)  # every block has a new peak
    logits[3] = math.nan
    targets = torch.tensor([50, 3, 56, -100, 20])
    for columns in (57, 52):
        targets = targets.clamp(max=columns - 1)
        expected = statistics_and_gradient(logits, targets, "torch", shard=VocabShard(columns), **options)
        found = statistics_and_gradient(logits, targets, "triton", shard=VocabShard(columns), **options)
        for actual, desired in zip(found, expected, strict=True):
            rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6, torch.float64: 1e-13}
            atol = 1e-6 if actual.dtype is torch.float16 else 1e-12
            torch.testing.assert_close(actual, desired, rtol=rounding.get(actual.dtype, 0), atol=atol)
