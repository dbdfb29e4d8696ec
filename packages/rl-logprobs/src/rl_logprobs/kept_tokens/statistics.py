"""Log-probabilities, entropy and divergence over kept sets, from the logits of the kept ids.

Every rank has all kept logits, so that nothing here communicates.  Computed in the widest dtype of the device, which
costs little at a few entries per token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

from rl_logprobs.kept_tokens.entries import KeptEntries, KeptTargets
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.softmax.vocab_parallel import TokenStatistics
from rl_logprobs.tensors import wide_dtype


class KeptSoftmax(NamedTuple):
    """A softmax over kept sets."""

    exponents: torch.Tensor  # ``[entries]``, scaled logits relative to their token's largest; 0 if not ``possible``
    weights: torch.Tensor  # ``[entries]``, ``exp(exponents)``; 0 where ``possible`` is false
    possible: torch.Tensor  # ``[entries]`` bool, false at entries that do not count and at logits of ``-inf``
    largest: torch.Tensor  # ``[tokens]``, the largest scaled logit
    log_sum: torch.Tensor  # ``[tokens]``, the logarithm of the sum of weights


def kept_softmax(
    logits: torch.Tensor, entries: KeptEntries, ignored: torch.Tensor, temperature: float | torch.Tensor
) -> KeptSoftmax:
    """Return the softmax of kept logits ``[entries]`` divided by a temperature (a number, or one per token)."""
    wide = wide_dtype(logits.device)
    if isinstance(temperature, torch.Tensor):
        scaled = logits.to(wide) / temperature.to(wide)[entries.rows]
    else:
        scaled = logits.to(wide) / temperature
    possible = entries.counted & (scaled != -math.inf)
    largest = entries.largest(scaled.detach().where(possible, -math.inf))
    largest = largest.where(largest != -math.inf, 0)
    exponents = (scaled - largest[entries.rows]).where(possible, 0)
    weights = exponents.exp().where(possible, 0)
    log_sum = entries.sums(weights).masked_fill(ignored, 1).log()
    return KeptSoftmax(exponents, weights, possible, largest, log_sum)


def kept_statistics(logits: torch.Tensor, targets: KeptTargets, options: SoftmaxOptions) -> TokenStatistics:
    """Return statistics of the softmax over kept sets, ``[tokens]`` in the dtype of the logits ``[entries]``."""
    entries, positions, ignored = targets
    softmax = kept_softmax(logits, entries, ignored, options.temperature)

    def finished(value: torch.Tensor) -> torch.Tensor:
        return value.masked_fill(ignored, 0).to(logits.dtype)

    at_target = functional.pad(softmax.exponents, (0, 1))[positions]
    impossible = ~functional.pad(softmax.possible, (0, 1))[positions]
    entropy = argmax = target_rank = None
    if options.entropy:
        mean_exponent = entries.sums(softmax.weights * softmax.exponents) * (-softmax.log_sum).exp()
        entropy = finished(softmax.log_sum - mean_exponent)
    if options.argmax:
        is_largest = softmax.possible & (softmax.exponents == 0)
        lowest = -entries.largest((-entries.ids).where(is_largest, torch.iinfo(torch.int64).min + 1))
        argmax = lowest.masked_fill(ignored, 0)
    if options.target_rank:
        threshold = at_target.masked_fill(impossible, -math.inf)
        greater = softmax.possible & (softmax.exponents > threshold[entries.rows])
        target_rank = entries.sums(greater.to(at_target.dtype)).long().masked_fill(ignored, 0)
    logprobs = finished((at_target - softmax.log_sum).masked_fill(impossible, -math.inf))
    return TokenStatistics(logprobs, finished(softmax.largest + softmax.log_sum), entropy, argmax, target_rank)


def kept_logprobs_of(softmax: KeptSoftmax, entries: KeptEntries) -> torch.Tensor:
    """Return the log-probability of every entry, ``[entries]``; ``-inf`` where it is impossible."""
    return (softmax.exponents - softmax.log_sum[entries.rows]).where(softmax.possible, -math.inf)


def kept_divergence(policy: KeptSoftmax, reference: KeptSoftmax, entries: KeptEntries) -> torch.Tensor:
    """Return ``KL(policy || reference)`` over the kept sets, ``[tokens]``; infinite where only the reference is 0."""
    probability = policy.weights * (-policy.log_sum[entries.rows]).exp()
    difference = policy.exponents - reference.exponents
    one_sided = entries.largest((policy.possible & ~reference.possible).to(difference.dtype)) > 0
    divergence = entries.sums(probability * difference) - policy.log_sum + reference.log_sum
    return divergence.masked_fill(one_sided, math.inf)
