"""Top-k, top-p and min-p as one threshold per token: a filter keeps the logits at or above it.

All logits that equal the threshold are kept, as vLLM and transformers do for top-k; for top-p these two keep the tied
tokens that their sort puts first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from rl_logprobs.errors import OptionError
from rl_logprobs.softmax.log2_scale import TemperatureScale
from rl_logprobs.softmax.threshold import ThresholdSearch
from rl_logprobs.softmax.vocab_shard import VocabColumns
from rl_logprobs.tensors import statistics_dtype

#: The largest ``k`` for which the ranks exchange their ``k`` largest logits of each token.
MAX_EXCHANGED_K = 256


@dataclass(frozen=True)
class SamplingFilter:
    """The filters of a sampler, applied after the temperature.

    Raises:
        OptionError: a number is outside its range, or the order is unknown.

    Example:
        >>> import torch
        >>> from rl_logprobs import SamplingFilter, token_logprobs
        >>> logits = torch.tensor([[0.0, 0.0, -1.0, -2.0]])
        >>> token_logprobs(logits, torch.tensor([0]), sampling=SamplingFilter(top_k=2))
        tensor([-0.6931])
        >>> token_logprobs(logits, torch.tensor([3]), sampling=SamplingFilter(top_k=2))
        tensor([-inf])
    """

    top_k: int | None = None  # keep the ``k`` largest logits, and logits equal to the last of them; None keeps all
    # keep the most probable tokens that together reach this probability, among those that ``top_k`` kept (Holtzman et
    # al., arXiv:1904.09751); 1 keeps all
    top_p: float = 1.0
    # keep tokens at least this probable relative to the most probable (Nguyen et al., arXiv:2407.01082); 0 keeps all
    min_p: float = 0.0
    # ``"vllm"`` applies min-p, top-k, top-p; ``"transformers"`` top-k, top-p, min-p.  The results differ where min-p
    # removes tokens that top-p would have counted
    order: Literal["vllm", "transformers"] = "vllm"

    def __post_init__(self) -> None:
        if self.top_k is not None and not (self.top_k >= 1 and self.top_k % 1 == 0):
            raise OptionError(
                f"top_k must be an integer of 1 or more, got {self.top_k}; leave it out to keep all tokens"
            )
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.order not in ("vllm", "transformers"):
            raise OptionError(f"order must be 'vllm' or 'transformers', got {self.order!r}")


@torch.no_grad()
def min_kept_logit(
    logits: torch.Tensor, shard: VocabColumns, temperature: float | torch.Tensor, sampling: SamplingFilter | None
) -> torch.Tensor | None:
    """Return the least logit that the filter keeps, ``[tokens]`` in the statistics dtype; None if it keeps all."""
    # With a ``top_k`` up to ``MAX_EXCHANGED_K``: one collective, and another one for top-p. Otherwise: one for the
    # largest logit, and for each of top-k and top-p one per byte of a logit.
    if sampling is None or (sampling.top_k is None and sampling.top_p == 1 and sampling.min_p == 0):
        return None
    scale = TemperatureScale.of(temperature, statistics_dtype(logits.dtype))
    search = ThresholdSearch(logits[..., : shard.width], shard.group, scale)
    top_k = None if sampling.top_k is None or sampling.top_k >= shard.vocab_size else sampling.top_k
    largest = search.largest(top_k) if top_k is not None and top_k <= MAX_EXCHANGED_K else None
    max_logit = search.max_logit() if largest is None else largest[:, 0]

    min_p = _min_p_threshold(sampling.min_p, max_logit, scale)
    threshold = min_p if sampling.order == "vllm" else torch.full_like(max_logit, -math.inf)
    if largest is not None:
        threshold = torch.maximum(threshold, largest[:, -1])
        if sampling.top_p < 1:
            threshold = torch.maximum(threshold, search.top_p_among(largest, sampling.top_p, threshold))
    else:
        if top_k is not None:
            threshold = torch.maximum(threshold, search.kth_largest(top_k))
        if sampling.top_p < 1:
            threshold = torch.maximum(threshold, search.top_p(sampling.top_p, max_logit, threshold))
    return torch.maximum(threshold, min_p).to(statistics_dtype(logits.dtype))


def _min_p_threshold(min_p: float, max_logit: torch.Tensor, scale: TemperatureScale) -> torch.Tensor:
    """Return the logit with ``min_p`` times the largest probability."""
    if min_p == 0:
        return torch.full_like(max_logit, -math.inf)
    return max_logit + (math.log(min_p) / scale.inv_temperature if min_p < 1 else 0.0)
