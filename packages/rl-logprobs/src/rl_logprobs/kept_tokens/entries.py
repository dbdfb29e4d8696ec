"""The kept ids that count for this rank's tokens, checked; log-probabilities, entropy and divergence over them.

Every rank has all kept logits, so that the statistics do not communicate.  They are computed in the widest dtype of the
device, which costs little at a few entries per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from rl_logprobs.errors import KeptTokensError, OptionError, ShapeError, TargetError
from rl_logprobs.kept_tokens.kept_sets import KeptTokens
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.softmax.vocab_parallel import TokenStatistics
from rl_logprobs.softmax.vocab_shard import TokenSlice
from rl_logprobs.targets import Targets
from rl_logprobs.tensors import fails, wide_dtype


@dataclass(frozen=True)
class KeptEntries:
    """The kept sets of this rank's tokens as flat entries."""

    ids: torch.Tensor  # ``[entries]`` vocabulary ids
    rows: torch.Tensor  # ``[entries]`` the token of each, ascending
    offsets: torch.Tensor  # ``[tokens + 1]`` the start of each token's entries
    counted: torch.Tensor  # ``[entries]`` bool, false at tokens that are not scored

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's entries, ``[tokens]``; the order of summation is fixed."""
        return torch.segment_reduce(values, "sum", offsets=self.offsets, initial=0, unsafe=True)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest of each token's entries, ``[tokens]``; the dtype's lowest value without entries."""
        integral = not values.is_floating_point()
        lowest = torch.iinfo(values.dtype).min if integral else -math.inf
        start = values.new_full((self.offsets.shape[0] - 1,), lowest)
        return start.scatter_reduce_(0, self.rows, values, "amax")

    def positions(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the entry that holds each token's target, ``[tokens]``; the number of entries if no entry does."""
        entries = self.ids.shape[0]
        is_target = self.counted & (self.ids == targets[self.rows])
        last = self.largest(torch.arange(entries, device=self.ids.device).where(is_target, -1))
        return last.where(last >= 0, entries)


def kept_entries(
    kept_tokens: KeptTokens, tokens: TokenSlice, ignored: torch.Tensor, vocab_size: int, *, shift: bool = False
) -> KeptEntries:
    """Return the entries for this rank's tokens, from rows for the full batch or for these tokens."""
    # Rows of ignored tokens do not count; ``shift`` shifts the rows as the targets.
    if kept_tokens.ids.device != ignored.device:
        raise OptionError(f"kept_tokens are on {kept_tokens.ids.device} and the tokens on {ignored.device}; move one")
    is_full = kept_tokens.num_tokens == math.prod(tokens.full)
    if not is_full and kept_tokens.num_tokens != math.prod(tokens.shape):
        raise ShapeError(
            f"kept_tokens has {kept_tokens.num_tokens} rows, and the tokens {tokens.full} need {math.prod(tokens.full)}"
            + (f", or {math.prod(tokens.shape)} for this rank's alone" if tokens.shape != tokens.full else "")
        )
    if shift:
        if not is_full and tokens.shape[-1] != tokens.full[-1]:
            raise ShapeError(
                f"shift needs the rows of the full sequence of {tokens.full[-1]} tokens, because the last of this "
                f"rank's {tokens.shape[-1]} is scored under the next rank's first"
            )
        kept_tokens = kept_tokens.next_token()
    if is_full and tokens.shape != tokens.full:
        rows = torch.arange(kept_tokens.num_tokens, device=kept_tokens.ids.device).view(tokens.full)
        kept_tokens = kept_tokens.select(tokens.local(rows))
    rows, flat_ignored = kept_tokens.rows(), ignored.reshape(-1)
    entries = KeptEntries(kept_tokens.ids, rows, kept_tokens.offsets, ~flat_ignored[rows])
    _check(entries, flat_ignored, vocab_size)
    return entries


def _check(entries: KeptEntries, ignored: torch.Tensor, vocab_size: int) -> None:
    empty = ~ignored & (entries.offsets.diff() == 0)
    outside = entries.counted & (entries.ids >= vocab_size)
    if fails(~empty.any(), "the kept set of a scored token is empty"):
        raise KeptTokensError(
            f"the kept sets of {int(empty.sum())} scored tokens are empty, the first of them at token "
            f"{int(empty.int().argmax())}; mark tokens that no sampler drew with ignore_index (or mask=0)"
        )
    if fails(~outside.any(), f"a kept set contains an id outside [0, {vocab_size})"):
        first = int(outside.int().argmax())
        raise KeptTokensError(
            f"{int(outside.sum())} kept ids are outside [0, {vocab_size}), the first is {entries.ids[first].item()} of "
            f"token {entries.rows[first].item()}"
        )


class KeptTargets(NamedTuple):
    """Targets with the kept entries of their tokens."""

    entries: KeptEntries  # the kept entries of this rank's tokens
    positions: torch.Tensor  # ``[tokens]``, the entry of each target; the number of entries where there is none
    ignored: torch.Tensor  # ``[tokens]`` bool, true at tokens that are not scored


def kept_targets(kept_tokens: KeptTokens, tokens: TokenSlice, targets: Targets, vocab_size: int) -> KeptTargets:
    """Return this rank's targets with their entries; the other arguments are as for ``kept_entries``."""
    entries = kept_entries(kept_tokens, tokens, targets.ignored, vocab_size, shift=targets.shifted)
    flat_targets, flat_ignored = targets.ids.reshape(-1), targets.ignored.reshape(-1)
    positions = entries.positions(flat_targets)
    if kept_tokens.missing_target == "error":
        _check_kept(entries, positions, flat_targets, flat_ignored)
    return KeptTargets(entries, positions, flat_ignored)


def _check_kept(entries: KeptEntries, positions: torch.Tensor, targets: torch.Tensor, ignored: torch.Tensor) -> None:
    missing = (positions == entries.ids.shape[0]) & ~ignored
    if fails(~missing.any(), "a target is outside its kept set"):
        first = int(missing.int().argmax())
        kept_ids = entries.ids[entries.offsets[first] : entries.offsets[first + 1]].tolist()
        shown = ", ".join(map(str, kept_ids[:8])) + (", ..." if len(kept_ids) > 8 else "")
        raise TargetError(
            f"{int(missing.sum())} of {int((~ignored).sum())} scored targets are outside their kept sets; the first is "
            f"target {targets[first].item()} of token {first}, which kept {len(kept_ids)} ids: {shown}.  Rows follow "
            f"the targets (shifted with shift=True); missing_target='-inf' gives such targets -inf"
        )


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
