"""Statistics of targets over the full vocabulary or over kept sets, whatever the logits come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.softmax.vocab_parallel import SoftmaxStatistics
from rl_logprobs.softmax.vocab_shard import TokenSlice, VocabColumns
from rl_logprobs.support.entries import KeptEntries, kept_targets
from rl_logprobs.support.kept_sets import Support
from rl_logprobs.support.statistics import kept_statistics
from rl_logprobs.targets import Targets


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of each token's distribution; float32 (float64 for float64 logits), in nats.

    Every field has the shape of the logits' leading dims and is 0 where the target is ``ignore_index``.

    Attributes:
        logprobs: log-probability of the target.
        logsumexp: log of the partition sum; its square is the z-loss of PaLM (arXiv:2204.02311, section 5).
        entropy: entropy of the distribution, or None if it was not requested.
        argmax: the most probable vocabulary id (the lowest of several), int64, or None if it was not requested.
        target_rank: number of tokens with a larger logit than the target (0: none is more probable), int64, or None
            if it was not requested.

    Example:
        >>> import torch
        >>> from rl_logprobs import TokenStatistics, token_statistics
        >>> isinstance(token_statistics(torch.zeros(2, 9), torch.tensor([0, 1])), TokenStatistics)
        True
    """

    logprobs: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    target_rank: torch.Tensor | None = None


class Source(Protocol):
    """What logits come from: a tensor of logits, or hidden states and a head."""

    @property
    def vocab(self) -> VocabColumns:
        """The columns of this rank."""

    @property
    def tokens(self) -> TokenSlice:
        """The tokens of this rank."""

    def full_statistics(self, targets: Targets, options: SoftmaxOptions) -> SoftmaxStatistics:
        """Return flat statistics over the full vocabulary."""

    def entry_logits(self, entries: KeptEntries) -> torch.Tensor:
        """Return the logits of kept entries, ``[entries]``, the same on every rank."""


def score(source: Source, targets: Targets, support: Support | None, options: SoftmaxOptions) -> TokenStatistics:
    """Return the statistics of a rank's targets, in their shape."""
    if support is None:
        found = source.full_statistics(targets, options)
    else:
        kept = kept_targets(support, source.tokens, targets, source.vocab.vocab_size)
        found = kept_statistics(source.entry_logits(kept.entries), kept, options)
    shaped = (None if value is None else value.view(targets.ids.shape) for value in found)
    return TokenStatistics(*shaped)  # type: ignore[arg-type]  # the first two are always there
