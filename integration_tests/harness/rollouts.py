"""Completions with truncated sampling, as a generator returns them: ids, log-probabilities and kept sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import rl_logprobs


@dataclass(frozen=True)
class Completions:
    """Sampled continuations of prompts of one length.

    Args:
        tokens: ``[batch, seq]``, with the prompts; after the end of a sample, what the generator would have drawn.
        logprobs: ``[batch, seq]``, of the next token, 0 where that is of the prompt and at the end.
        kept_tokens: the ids that were kept for the next token.
    """

    tokens: Tensor
    logprobs: Tensor
    kept_tokens: rl_logprobs.KeptTokens


def sample_completions(
    next_logits: Callable[[Tensor], Tensor],
    prompts: Tensor,
    lengths: Sequence[int],
    length: int,
    sampling: rl_logprobs.SamplingFilter,
) -> Completions:
    """Sample token by token.

    Args:
        next_logits: of tokens ``[batch, tokens]`` the logits ``[batch, vocab]`` of the next one.
        prompts: ``[batch, prompt]``.
        lengths: tokens of each completion, without its prompt.
        length: tokens of the rows.
        sampling: the truncation.
    """
    batch, prompt = prompts.shape
    tokens = prompts
    logprobs: list[Tensor] = [torch.zeros(batch, prompt - 1, dtype=torch.float64)]
    rows: list[list[list[int]]] = [[] for _ in range(batch)]
    for step in range(length - prompt):
        logits = next_logits(tokens)
        drawn = rl_logprobs.sample_tokens(logits, seed=step, sampling=sampling)
        logprobs.append(rl_logprobs.token_logprobs(logits, drawn, sampling=sampling)[:, None])
        kept = rl_logprobs.sampling_mask(logits, sampling)
        for row, (start, end) in zip(rows, kept.offsets.unfold(0, 2, 1).tolist(), strict=True):
            row.append(kept.ids[start:end].tolist())
        tokens = torch.cat([tokens, drawn[:, None]], 1)
    rows = [row[:own] for row, own in zip(rows, lengths, strict=True)]
    return Completions(
        tokens,
        torch.cat([*logprobs, torch.zeros(batch, 1, dtype=torch.float64)], 1),
        rl_logprobs.KeptTokens.from_completions(rows, [prompt] * batch, length).next_token(),
    )
