"""Calls of ``rl_logprobs``: over tokens, vocabulary, samples, parameters and candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rl_logprobs as rl
from growth.measure import Case

TOKENS = (100, 300, 1000, 3000, 10_000)
VOCAB = (1000, 3000, 10_000, 30_000, 100_000)
SAMPLES = (1000, 3000, 10_000, 30_000, 100_000)
PARAMETERS = (20, 60, 200, 600, 2000)
Logits = Callable[[Tensor, Tensor], Any]


def _over_tokens(call: Logits) -> Callable[[int], Callable[[], Any]]:
    return lambda size: _logits(call, size, 256)


def _over_vocab(call: Logits) -> Callable[[int], Callable[[], Any]]:
    return lambda size: _logits(call, 16, size)


def _logits(call: Logits, tokens: int, vocab: int) -> Callable[[], Any]:
    logits = torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.arange(tokens) % vocab
    return lambda: call(logits, targets)


def _trained(logits: Tensor, targets: Tensor) -> Any:
    rl.token_logprobs(logits, targets).sum().backward()


def _statistics(logits: Tensor, targets: Tensor) -> Any:
    return rl.token_statistics(logits, targets, entropy=True, argmax=True, target_rank=True)


def _filtered(logits: Tensor, targets: Tensor) -> Any:
    return rl.token_logprobs(logits, targets, sampling=rl.SamplingFilter(top_k=20, top_p=0.9, min_p=0.01))


def _sampled(logits: Tensor, targets: Tensor) -> Any:
    return rl.sample_tokens(logits.detach(), seed=0, sampling=rl.SamplingFilter(top_k=20, top_p=0.9))


def _kept(logits: Tensor, targets: Tensor) -> Any:
    kept_tokens = rl.sampling_mask(logits.detach(), rl.SamplingFilter(top_k=20))
    return rl.token_logprobs(logits, logits.detach().argmax(-1), kept_tokens=kept_tokens)


def _divergence(logits: Tensor, targets: Tensor) -> Any:
    return rl.token_divergence(logits, logits.detach() + 1, beta=0.5)


LOGITS: dict[str, Logits] = {
    "token_logprobs with backward": _trained,
    "token_statistics": _statistics,
    "token_logprobs with a filter": _filtered,
    "sample_tokens": _sampled,
    "sampling_mask and token_logprobs with it": _kept,
    "topk_logprobs": lambda logits, targets: rl.topk_logprobs(logits, 8),
    "logprobs_at": lambda logits, targets: rl.logprobs_at(logits, targets[:, None]),
    "token_kl": lambda logits, targets: rl.token_kl(logits, logits.detach() + 1),
    "token_divergence": _divergence,
}


def _linear(tokens: int, vocab: int) -> Callable[[], Any]:
    hidden, weight = torch.randn(tokens, 16, requires_grad=True), torch.randn(vocab, 16, requires_grad=True)
    return lambda: rl.linear_token_logprobs(hidden, weight, torch.arange(tokens) % vocab).sum().backward()


def _advantages(size: int) -> Callable[[], Any]:
    rewards, prompts = torch.randn(size), torch.arange(size) // 8
    return lambda: rl.group_advantages(rewards, prompts, size // 8 + 1)


def _losses(size: int) -> Callable[[], Any]:
    values, mask = torch.randn(size // 10, 10), torch.ones(size // 10, 10)

    def call() -> Any:
        weights = rl.importance_weights(values, values - 0.1, mask, high=2.0)
        loss = rl.ppo_loss(values, values - 0.1, values, mask)
        metrics = rl.ratio_metrics(values, values - 0.1, mask, weights=weights, loss=loss).values()
        kept = rl.rejection_mask(values, values - 0.1, mask, level="sequence", high=2.0)
        gspo = rl.gspo_loss(values, values - 0.1, values, mask)
        return weights, loss, metrics, kept, gspo, rl.cispo_loss(values, values, values, mask, clip_high=2.0)

    return call


def _micro_batches(size: int) -> Callable[[], Any]:
    masks = [torch.ones(4, 16) for _ in range(size)]
    segments = [torch.arange(4)[:, None].expand(4, 16) + 4 * number for number in range(size)]

    def call() -> Any:
        tokens = rl.mean_weights(masks)
        rl.mean_weights(masks, per="sequence")
        return [rl.global_mean(mask, mask, tokens) for mask in masks], segments

    return call


def _segments(size: int) -> Callable[[], Any]:
    """Packed micro-batches of 64 tokens, of ``size`` sequences in all: each counts its own."""
    count = size // 16
    masks = [torch.ones(1, 64) for _ in range(count)]
    segments = [16 * number + torch.arange(64)[None] // 4 for number in range(count)]

    def call() -> Any:
        weights = rl.mean_weights(masks, per="sequence", segments=segments, num_segments=16 * count)
        return [rl.global_mean(m, m, weights, segments=s) for m, s in zip(masks, segments, strict=True)]

    return call


def _targets(size: int) -> Callable[[], Any]:
    tokens, starts = torch.arange(size), torch.arange(0, size + 1, 10)
    return lambda: rl.next_token_targets(tokens[None], cu_seqlens=starts)


def _gradients(count: int) -> dict[str, Tensor]:
    parameters = {f"layers.{number}": torch.zeros(8, requires_grad=True) for number in range(count)}
    for parameter in parameters.values():
        parameter.grad = torch.ones(8)
    return parameters


def _clip(size: int) -> Callable[[], Any]:
    parameters = _gradients(size)
    return lambda: rl.clip_grad_norm_(parameters.values(), 1.0)


def _norm_of_each(size: int) -> Callable[[], Any]:
    parameters = _gradients(size)
    return lambda: rl.grad_norms(parameters)


def _drift(tokens: int, candidates: int) -> Callable[[], Any]:
    trainer = torch.randn(tokens)
    shift = torch.randn(tokens)

    def score(**given: float) -> Tensor:
        return trainer + shift * sum(given.values())

    options = {f"cause {number}": {f"keyword_{number}": 0.01 * (number + 1)} for number in range(candidates)}
    generator = trainer + shift * 0.01 * candidates
    return lambda: rl.explain_drift(generator, lambda **given: score(**given), options)


CASES = [
    *(Case(f"{name}: tokens", TOKENS, _over_tokens(call)) for name, call in LOGITS.items()),
    *(Case(f"{name}: vocabulary", VOCAB, _over_vocab(call)) for name, call in LOGITS.items()),
    Case("linear_token_logprobs with backward: tokens", TOKENS, lambda size: _linear(size, 256)),
    Case("linear_token_logprobs with backward: vocabulary", VOCAB, lambda size: _linear(16, size)),
    Case("group_advantages: samples", SAMPLES, _advantages),
    Case("losses, weights, masks and metrics: tokens", SAMPLES, _losses),
    Case("mean_weights and global_mean: micro-batches", PARAMETERS, _micro_batches),
    Case("mean_weights and global_mean, packed: samples", SAMPLES, _segments),
    Case("next_token_targets: tokens", SAMPLES, _targets),
    Case("headtail_permutation: tokens", SAMPLES, lambda size: lambda: rl.headtail_permutation(size // 16 * 16, 8)),
    Case("clip_grad_norm_: parameters", PARAMETERS, _clip),
    Case("grad_norms: named groups", PARAMETERS, _norm_of_each),
    Case("explain_drift: tokens", SAMPLES, lambda size: _drift(size, 4)),
    Case("explain_drift, in which none is nearly all: candidates", (2, 4, 8, 16, 32), lambda s: _drift(100, s), 2.0),
]
