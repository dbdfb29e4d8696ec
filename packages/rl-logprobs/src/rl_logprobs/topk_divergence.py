"""Divergence from a teacher with known most probable ids."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from rl_logprobs._torch_compat import assert_on_device
from rl_logprobs.errors import DtypeError, OptionError, ShapeError
from rl_logprobs.kept_tokens.entries import KeptEntries, kept_entries
from rl_logprobs.kept_tokens.kept_sets import KeptTokens
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.softmax.vocab_shard import TokenSlice
from rl_logprobs.sources import Source, tokens_of
from rl_logprobs.targets import Targets
from rl_logprobs.tensors import require_same_device, statistics_dtype, wide_dtype

#: Sums of probabilities may exceed 1 by this much: log-probabilities of engines are rounded to 16 bits.
ROUNDING = 0.02


def topk_divergence(
    source: Source,
    teacher: tuple[torch.Tensor, torch.Tensor],
    temperature: float | torch.Tensor,
    ignored: torch.Tensor,
    beta: float,
    *,
    tail: bool,
) -> torch.Tensor:
    """Return the divergence over the teacher's ids, with ``tail`` also over all other ids as one outcome."""
    # ``teacher`` has ids and log-probabilities, ``[..., k]``, of this rank's tokens or of the full batch. One
    # collective forward for the logits of the ids, and with ``tail`` a second one for the student's partition sum.
    ids, logprobs = (tokens_of(part, _tokens(part, source.tokens), source.tokens) for part in _checked(teacher))
    k = ids.shape[-1]
    possible = (logprobs != -math.inf) & ~ignored[..., None]
    entries = _entries(ids, possible, ignored, source)
    _check_logprobs(logprobs, possible, possible.any(-1) | ignored | bool(tail))
    logits = source.entry_logits(entries)
    dtype = statistics_dtype(torch.promote_types(logits.dtype, logprobs.dtype))
    flat_temperature = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    s = (logits.view(-1, k).to(dtype) / flat_temperature).masked_fill(~possible.view(-1, k), -math.inf)
    t = logprobs.detach().reshape(-1, k).to(dtype).masked_fill(~possible.view(-1, k), -math.inf)
    if tail and k < source.vocab.vocab_size:
        statistics = source.full_statistics(Targets(-ignored.long(), ignore_index=-1), SoftmaxOptions(temperature))
        s, t = (_with_tail(part, ignored) for part in (s - statistics.logsumexp.to(dtype)[:, None], t))
    s, t = (torch.log_softmax(part.masked_fill(ignored.reshape(-1, 1), 0), -1) for part in (s, t))
    return _divergence(s, t, beta).masked_fill(ignored.reshape(-1), 0).view(ignored.shape)


def _checked(teacher: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(teacher) != 2:
        raise ShapeError(f"a teacher's top-k is (ids, logprobs), got {len(teacher)} values")
    ids, logprobs = teacher
    if not logprobs.is_floating_point():
        raise DtypeError(f"the teacher's log-probabilities must be floating point, got {logprobs.dtype}")
    if ids.shape != logprobs.shape or ids.dim() < 2 or ids.shape[-1] == 0:
        raise ShapeError(
            f"the teacher's ids and log-probabilities must both be [..., tokens, k], got {tuple(ids.shape)} and "
            f"{tuple(logprobs.shape)}"
        )
    return ids, logprobs


def _tokens(part: torch.Tensor, wanted: TokenSlice) -> TokenSlice:
    leading = tuple(part.shape[:-1])
    return wanted if leading == wanted.shape else TokenSlice.all_of(leading)


def _entries(ids: torch.Tensor, possible: torch.Tensor, ignored: torch.Tensor, source: Source) -> KeptEntries:
    require_same_device(ids=ids, tokens=ignored)
    k = ids.shape[-1]
    offsets = torch.arange(ignored.numel() + 1, device=ids.device) * k
    # Ids of tokens that do not count may be anything; k different ids replace them.
    filled = torch.where(ignored[..., None], torch.arange(k, device=ids.device), ids)
    kept_tokens = KeptTokens(filled.reshape(-1), offsets)
    tokens = TokenSlice.all_of(source.tokens.shape)
    entries = kept_entries(kept_tokens, tokens, ignored, source.vocab.vocab_size)
    return replace(entries, counted=entries.counted & possible.reshape(-1))


def _check_logprobs(logprobs: torch.Tensor, possible: torch.Tensor, known: torch.Tensor) -> None:
    total = logprobs.detach().to(wide_dtype(logprobs.device)).exp().where(possible, 0).sum(-1)
    valid = (total <= 1 + ROUNDING).all()
    if total.device.type != "cpu":
        assert_on_device(valid, "the probabilities of a teacher's ids sum to more than 1")
        assert_on_device(known.all(), "a teacher has no id with a probability at a token that counts")
    elif not known.all():
        raise OptionError(
            f"the teacher has no id with a probability at {int((~known).sum())} tokens that count; mask them, or count "
            f"the rest of the vocabulary with tail=True"
        )
    elif not valid:
        raise OptionError(
            f"the probabilities of the teacher's ids sum to {total.max().item():.4g} at one token; give "
            f"log-probabilities over the full vocabulary, not logits"
        )


def _with_tail(logprobs: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
    """Append the logarithm of the remaining mass; the mass is at least the rounding error."""
    mass = logprobs.masked_fill(ignored.reshape(-1, 1), -math.inf).exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, (1 - mass).clamp(min=torch.finfo(mass.dtype).eps).log()], -1)


def _divergence(s: torch.Tensor, t: torch.Tensor, beta: float) -> torch.Tensor:
    if beta == 0:
        return _kl(t, s)
    if beta == 1:
        return _kl(s, t)
    neither = (s == -math.inf) & (t == -math.inf)  # the logarithm of their sum has no gradient
    s_part, t_part = s.masked_fill(neither, 0) + math.log1p(-beta), t.masked_fill(neither, 0) + math.log(beta)
    mixture = torch.logaddexp(s_part, t_part)
    return (1 - beta) * _kl(s, mixture) + beta * _kl(t, mixture)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return ``KL(p || q)`` of log-probabilities over the last dim; outcomes without probability count nothing."""
    possible = p != -math.inf
    difference = p.masked_fill(~possible, 0) - q.masked_fill(~possible, 0)
    return (p.exp() * difference).sum(-1)
