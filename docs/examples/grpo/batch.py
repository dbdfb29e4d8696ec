"""Samples, and how a batch of them is dealt to ranks and laid out for the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

import rl_logprobs
from fsdp_runtime.steps import routes_from_generator

IGNORED = -100
"""The target of a position that is not scored."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Sample:
    """A prompt and what followed it, as token ids without padding.

    Attributes:
        prompt: The prompt's tokens, at least one.
        completion: The tokens that followed, the end-of-text token included.
        logprobs: The generator's log-prob of each completion token; empty for text that nobody sampled.
        kept: The ids among which each completion token was chosen; empty where that was the whole vocabulary.
        routes: ``[tokens, layers, k]``, the experts of each token that a mixture ran, all but the last; None without.
    """

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    kept: list[list[int]] = field(default_factory=list)
    routes: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Batch:
    """Samples as tensors of shape ``[batch, seq]``, padded on the right.

    Because attention is causal and positions count from the left, padding on the right needs no attention mask.

    Attributes:
        tokens: Prompt, completion, padding.
        targets: Position ``i`` holds the token at ``i + 1`` where that is part of the completion, else ``IGNORED``.
        logprobs: The generator's log-prob of each target; zero elsewhere.
        kept_tokens: The kept ids of each target, over which log-probs are normalised; None for the whole vocabulary.
        routes: ``[layers, batch * seq, k]``, the generator's experts of each token, -1 where it ran none; None without.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    logprobs: torch.Tensor
    kept_tokens: rl_logprobs.KeptTokens | None = None
    routes: torch.Tensor | None = None

    @property
    def mask(self) -> torch.Tensor:
        """``[batch, seq]``, true where there is a target."""
        return self.targets != IGNORED


def chunks(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Cut a sequence into ``count`` neighbouring parts of equal length.

    Raises:
        ValueError: The length does not divide.
    """
    size, rest = divmod(len(items), count)
    if rest or not size:
        raise ValueError(f"{len(items)} items cannot be dealt evenly into {count} parts")
    return [items[start : start + size] for start in range(0, len(items), size)]


def padded_length(samples: Sequence[Sample], multiple: int = 4) -> int:
    """The longest sample's length in tokens, rounded up so that a run sees only a few shapes."""
    longest = max(len(sample.prompt) + len(sample.completion) for sample in samples)
    return -(-longest // multiple) * multiple


def collate(samples: Sequence[Sample], length: int, pad_id: int, device: torch.device) -> Batch:
    """Lay samples out as tensors.

    Args:
        samples: The rows.
        length: The sequence length to pad to.
        pad_id: The token to pad with.
        device: Where the tensors should be.

    Returns:
        The batch.
    """
    tokens = torch.full((len(samples), length), pad_id)
    targets = torch.full((len(samples), length), IGNORED)
    logprobs = torch.zeros(len(samples), length)
    for row, sample in enumerate(samples):
        text = torch.tensor(sample.prompt + sample.completion)
        scored = slice(len(sample.prompt) - 1, len(text) - 1)
        tokens[row, : len(text)] = text
        targets[row, scored] = text[len(sample.prompt) :]
        if sample.logprobs:
            logprobs[row, scored] = torch.tensor(sample.logprobs)
    kept_tokens = None
    if any(sample.kept for sample in samples):
        starts = [len(sample.prompt) for sample in samples]
        rows = rl_logprobs.KeptTokens.from_completions([sample.kept for sample in samples], starts, length)
        kept_tokens = rows.next_token().to(device)  # the targets are shifted, too
    return Batch(
        tokens.to(device), targets.to(device), logprobs.to(device), kept_tokens, _routes(samples, length, device)
    )


def _routes(samples: Sequence[Sample], length: int, device: torch.device) -> torch.Tensor | None:
    """The experts of all tokens of a batch, if the samples have any."""
    sequences = [sample.routes for sample in samples]
    if any(routes is None for routes in sequences):
        return None
    lengths = torch.tensor([len(sample.prompt) + len(sample.completion) for sample in samples])
    return routes_from_generator(sequences, torch.arange(length) < lengths[:, None]).to(device)
