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


@pytest.mark.parametrize("layout", ["cut", "transposed", "strided", "three dims"])
def test_rows_of_any_strides_give_what_contiguous_rows_give(layout):
    views = {
        "cut": lambda x: x[:, :-1],
        "transposed": lambda x: x.transpose(0, 1),
        "strided": lambda x: x[..., ::2],
        "three dims": lambda x: x.unflatten(0, (2, 1)).unflatten(2, (2, 2))[:, :, :, :1].transpose(0, 2),
    }
    full = torch.randn(2, 4, 70, generator=torch.Generator().manual_seed(0))
    view = views[layout](full)
    targets = torch.arange(view[..., 0].numel()).view(view.shape[:-1]) * 3
    targets.view(-1)[1] = -100
    expected = statistics_and_gradient(view.contiguous(), targets, "torch", entropy=True)
    leaf = full.clone().requires_grad_()
    found = token_statistics(views[layout](leaf * 1.0), targets, entropy=True, temperature=0.8, backend="triton")
    torch.testing.assert_close(found.logprobs, expected[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found.entropy, expected[-1], rtol=2e-6, atol=2e-6)
    (found.logprobs * 3 + found.logsumexp.square() * 0.1 + found.entropy).sum().backward()
    torch.testing.assert_close(views[layout](leaf.grad), expected[4], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("width", [1, 2, 1023, 8193, 151_936])
def test_every_width_gives_what_float64_gives(width):
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
    targets = torch.tensor([width - 1, width // 2])
    exact = statistics_and_gradient(logits.double(), targets, "torch", entropy=True)
    found = statistics_and_gradient(logits, targets, "triton", entropy=True)
    for actual, desired in zip(found, exact, strict=True):
        gradient = actual.dtype is torch.bfloat16
        rtol, atol = (2**-8, 1e-7) if gradient else (3e-6, 3e-6)
        torch.testing.assert_close(actual.to(desired.dtype), desired, rtol=rtol, atol=atol)


def test_elements_beyond_32_bits_are_reached():
    distance = 2**30 + 8
    storage = torch.empty(2 * distance + 5, dtype=torch.float16)  # of which three rows are touched
    rows = storage.as_strided((3, 5), (distance, 1))
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).half()
    targets = torch.tensor([4, 0, 2])
    rows.copy_(logits)
    expected = token_statistics(logits, targets, entropy=True, backend="torch")
    found = token_statistics(rows, targets, entropy=True, backend="triton")
    torch.testing.assert_close(found[:3], expected[:3], rtol=2e-6, atol=2e-6)
    columns = storage.as_strided((3, 5), (1, distance // 2))
    columns.copy_(logits)
    found = token_statistics(columns, targets, backend="triton")
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=2e-6, atol=2e-6)
