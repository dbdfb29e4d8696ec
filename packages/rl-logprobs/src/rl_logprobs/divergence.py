"""Divergence from a policy: over all ids, over a teacher's most probable, or estimated from the sampled tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.distributed as dist

from rl_logprobs.errors import DtypeError, OptionError, PlacementError, ShapeError
from rl_logprobs.kept_tokens.entries import KeptEntries, kept_divergence, kept_entries, kept_softmax
from rl_logprobs.kept_tokens.kept_logits import kept_logits
from rl_logprobs.kept_tokens.kept_sets import KeptTokens
from rl_logprobs.softmax.divergence import softmax_divergence
from rl_logprobs.softmax.log2_scale import check_temperature
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.softmax.vocab_shard import LocalLogits, TokenSlice, VocabColumns, VocabShard, locate_logits
from rl_logprobs.sources import LinearLogits, LogitSource, Source, tokens_of
from rl_logprobs.targets import Targets, local_targets
from rl_logprobs.tensors import fails, require_same_device, statistics_dtype, wide_dtype

KlEstimator = Literal["k1", "k2", "k3"]
#: Sums of probabilities may exceed 1 by this much: log-probabilities of engines are rounded to 16 bits.
ROUNDING = 0.02


def kl_estimate(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    estimator: KlEstimator = "k3",
    *,
    sampled_logprobs: torch.Tensor | None = None,
    gradient: Literal["estimator", "unbiased"] = "estimator",
) -> torch.Tensor:
    """Estimate ``KL(policy || reference)`` from sampled tokens.

    With ``r = reference_logprobs - logprobs`` (Schulman, "Approximating KL Divergence", 2020): ``k1 = -r`` is
    unbiased and may be negative, ``k2 = r**2 / 2`` is biased with low variance, ``k3 = exp(r) - 1 - r`` is
    unbiased and never negative (used in GRPO, arXiv:2402.03300, equation 4).

    An unbiased *value* does not make its gradient the divergence's.  For tokens that the policy itself sampled, the
    gradient of ``k1`` is 0 on average, the gradient of ``k3`` is ``KL(reference || policy)``'s, and the gradient of
    ``k2`` is right (Liu et al., "Rethinking KL Regularization in RLHF", arXiv:2510.01555).  Two ways to the right
    gradient:

    * ``gradient="unbiased"``: the value of the estimator with the gradient of ``k2``, for tokens sampled by the policy.
    * ``sampled_logprobs``: the estimator times the ratio of the policy and the policy that sampled, differentiated
      through both factors (DeepSeek-V3.2, arXiv:2512.02556, section 3.1); right for ``k1`` and ``k3``, also off-policy.

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, any shape, floating point.
        reference_logprobs: log-probabilities of the same tokens under the reference, of the same shape.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        sampled_logprobs: log-probabilities under the policy that sampled, of the same shape; a detached copy of
            ``logprobs`` if that is the policy itself.
        gradient: ``"estimator"`` for the formula's gradient, or ``"unbiased"``.

    Returns:
        One estimate per token in nats, of the shape of ``logprobs``, differentiable in both (with
        ``gradient="unbiased"`` in ``logprobs`` alone).

    Raises:
        LogprobsError: shapes, dtypes or devices do not fit, an option is unknown, or both ways to the right gradient
            are asked for.

    Example:
        >>> import torch
        >>> from rl_logprobs import kl_estimate
        >>> kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]), "k3")
        tensor([0.0000, 0.7183])
    """
    for name, other in (("reference_logprobs", reference_logprobs), ("sampled_logprobs", sampled_logprobs)):
        if other is not None and other.shape != logprobs.shape:
            raise ShapeError(f"logprobs {tuple(logprobs.shape)} and {name} {tuple(other.shape)} differ")
    for name, tensor in (("logprobs", logprobs), ("reference_logprobs", reference_logprobs)):
        if not tensor.is_floating_point():
            raise DtypeError(f"{name} must be floating point, got {tensor.dtype}")
    require_same_device(logprobs=logprobs, reference_logprobs=reference_logprobs)
    ratio = reference_logprobs - logprobs
    if estimator not in get_args(KlEstimator):
        raise OptionError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")
    value = divergence_of(ratio, estimator)
    if gradient not in ("estimator", "unbiased"):
        raise OptionError(f"gradient must be 'estimator' or 'unbiased', got {gradient!r}")
    if gradient == "unbiased":
        if sampled_logprobs is not None:
            raise OptionError("gradient='unbiased' is for tokens of the policy itself: leave out sampled_logprobs")
        with_gradient = (logprobs - reference_logprobs.detach()).square() / 2
        return value.detach() + with_gradient - with_gradient.detach()
    if sampled_logprobs is None:
        return value
    return (logprobs - sampled_logprobs.detach()).exp() * value


def divergence_of(log_ratio: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Return an estimate of ``KL(other || policy)`` from the log-ratios of policy and other, at the other's samples."""
    if estimator == "k1":
        return -log_ratio
    return log_ratio.square() / 2 if estimator == "k2" else log_ratio.expm1() - log_ratio


def token_kl(
    logits: torch.Tensor,
    reference_logits: torch.Tensor,
    *,
    shard: VocabShard | None = None,
    temperature: float | torch.Tensor = 1.0,
    mask: torch.Tensor | None = None,
    kept_tokens: KeptTokens | None = None,
) -> torch.Tensor:
    """Return ``KL(softmax(logits / T) || softmax(reference_logits / T))`` of each token, over the full vocabulary.

    One pass over both tensors and one collective forward, none backward.  Tokens with probability 0 under the policy
    contribute nothing; a token with probability 0 under the reference alone makes the divergence infinite.

    Args:
        logits: ``[..., tokens, vocab]``, plain, a DTensor or a local shard, as ``token_statistics`` takes them.
        reference_logits: the reference's logits of the same shape and placement, any floating dtype.
        shard: which ids the columns of local logits are, or how many ids are no padding; see ``VocabShard``.
        temperature: positive number, or positive tensor that broadcasts to this rank's tokens.
        mask: bool or integers of the logits' leading shape, the full batch or this rank's part; 0 at tokens that do
            not count (such as prompt and padding): value 0 and gradient 0, whatever their logits.
        kept_tokens: the divergence of the two distributions over the ids that the sampler kept, each normalised over
            them; one row per token, for the full batch or for this rank's part.

    Returns:
        Nats, of the logits' leading shape, float32 (float64 if either input is float64), differentiable in both.

    Raises:
        ShapeError: the two hold different tokens or columns, or the mask does not fit them.
        PlacementError: the vocabularies are sharded differently.
        LogprobsError: as ``token_statistics``, before any collective starts.

    Example:
        >>> import torch
        >>> from rl_logprobs import token_kl
        >>> token_kl(torch.tensor([[0.0, 2.0, 1.0]]), torch.zeros(1, 3))
        tensor([0.2662])
    """
    policy = locate_logits(logits, shard)
    reference = locate_logits(reference_logits, shard)
    _check_same_shard(policy, reference)
    require_same_device(logits=policy.values, reference_logits=reference.values)
    ignored = _ignored(mask, policy.tokens, policy.values.device)
    flat_temperature = check_temperature(temperature, ignored)
    if kept_tokens is not None:
        return _kept_kl(policy, reference, flat_temperature, ignored, kept_tokens)
    student, teacher = (LogitSource(**vars(side)).side(flat_temperature) for side in (policy, reference))
    return softmax_divergence(student, teacher, ignored.reshape(-1), beta=1.0).view(ignored.shape)


def token_divergence(
    student: torch.Tensor | LinearLogits,
    teacher: torch.Tensor | LinearLogits | tuple[torch.Tensor, torch.Tensor],
    *,
    beta: float = 0.0,
    temperature: float | torch.Tensor = 1.0,
    teacher_temperature: float | torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    shard: VocabShard | None = None,
    tail: bool = True,
) -> torch.Tensor:
    """Return the divergence of student and teacher at each token, the loss of on-policy distillation.

    With ``s`` and ``t`` their softmaxes over the full vocabulary and ``m = (1 - beta) * s + beta * t``: forward KL
    ``KL(t || s)`` for ``beta=0``, reverse KL ``KL(s || t)`` for ``beta=1``, and between them the generalised
    Jensen-Shannon divergence ``(1 - beta) * KL(s || m) + beta * KL(t || m)`` (Agarwal et al., "On-Policy Distillation
    of Language Models", arXiv:2306.13649; TRL's ``beta``).  It goes to 0 with ``beta`` and ``1 - beta``, unlike the
    two KL divergences.

    From hidden states (:class:`LinearLogits`) the logits of both are computed tile by tile, forward and backward, and
    never held.  One collective forward, and a second one for ``0 < beta < 1``; backward one for the student's hidden
    gradient.  A teacher's head that is sharded over other ranks or in other parts sends its rows to the ranks that
    need them, in two collectives more and once for each call.  Only the student has gradients.

    Args:
        student: ``[..., tokens, vocab]`` logits as ``token_statistics`` takes them, or :class:`LinearLogits`.
        teacher: either of the same vocabulary, of any dtype and hidden size: for the student's tokens on this rank, or
            for its full batch.  A head may be plain or sharded over any group that this rank is in; logits are in
            full or sharded as the student's.  Or ``(ids, logprobs)``, ``[..., k]`` each: the ``k`` most probable ids
            and their log-probabilities over the full vocabulary at the teacher's temperature, as ``topk_logprobs`` and
            engines return them; ids with log-probability ``-inf`` are left out.
        beta: from 0 to 1.
        temperature: positive number, or positive tensor that broadcasts to this rank's tokens.
        teacher_temperature: the teacher's, by default the same.
        mask: as for ``token_kl``, of the student's leading shape.
        shard: of logits, for either side; :class:`LinearLogits` has its own.
        tail: with a teacher's ``k`` ids, the mass outside of them is one outcome more (TRL's ``loss_add_tail``).  False
            normalises both over the ``k`` ids.

    Returns:
        Nats, of the student's leading shape, float32 (float64 if either side is float64).

    Raises:
        ShapeError: the two have different vocabularies or tokens, or shapes contradict each other.
        PlacementError: the teacher's logits are sharded otherwise, or this rank is not in the group of its head.
        DtypeError: an input is not floating point, or ids are not integers.
        OptionError: ``beta``, a temperature or another option is outside its range, or the teacher's values are no
            log-probabilities.
        KeptTokensError: a teacher's id occurs twice at a token, or is outside the vocabulary.  All errors but a wrong
            ``start`` of a shard are raised before any collective starts.

    Example:
        >>> import torch
        >>> from rl_logprobs import token_divergence
        >>> student, teacher = torch.zeros(1, 3), torch.tensor([[0.0, 2.0, 1.0]])
        >>> token_divergence(student, teacher), token_divergence(student, teacher, beta=0.5)
        (tensor([0.2662]), tensor([0.0687]))
    """
    if not 0 <= beta <= 1:
        raise OptionError(f"beta must be from 0 (forward KL) to 1 (reverse KL), got {beta}")
    source = _source(student, shard)
    values = student.hidden if isinstance(student, LinearLogits) else student
    ignored = _ignored(mask, source.tokens, values.device)
    flat_temperature = check_temperature(temperature, ignored)
    if isinstance(teacher, tuple):
        if teacher_temperature is not None:
            raise OptionError("log-probabilities of a teacher have its temperature: leave out teacher_temperature")
        return _topk_divergence(source, teacher, flat_temperature, ignored, beta, tail=tail)
    reference = _source(teacher, shard)
    if reference.vocab.vocab_size != source.vocab.vocab_size:
        raise ShapeError(
            f"the student's vocabulary has {source.vocab.vocab_size} ids and the teacher's "
            f"{reference.vocab.vocab_size}; a divergence needs one vocabulary (if one is padded, give it a "
            f"VocabShard with the number of ids)"
        )
    require_same_device(student=values, teacher=teacher.hidden if isinstance(teacher, LinearLogits) else teacher)
    other = flat_temperature if teacher_temperature is None else check_temperature(teacher_temperature, ignored)
    side = reference.reference_side(source.tokens, source.vocab, other)
    nats = softmax_divergence(source.side(flat_temperature), side, ignored.reshape(-1), float(beta))
    return nats.view(ignored.shape)


def _source(logits: torch.Tensor | LinearLogits, shard: VocabShard | None) -> Source:
    return logits.located() if isinstance(logits, LinearLogits) else LogitSource(**vars(locate_logits(logits, shard)))


def _ignored(mask: torch.Tensor | None, tokens: TokenSlice, device: torch.device) -> torch.Tensor:
    """Return a bool tensor of this rank's tokens, true where the mask is 0."""
    if mask is None:
        return torch.zeros(tokens.shape, dtype=torch.bool, device=device)
    if mask.layout is not torch.strided:
        raise DtypeError(f"mask must be dense, got {mask.layout}")
    if mask.is_meta and device.type != "meta":
        raise OptionError(f"mask is on the meta device, where it has no value, and logits are on {device}")
    return local_targets((mask != 0).to(torch.uint8), tokens, name="mask").to(device) == 0


def _kept_kl(
    policy: LocalLogits,
    reference: LocalLogits,
    temperature: float | torch.Tensor,
    ignored: torch.Tensor,
    kept_tokens: KeptTokens,
) -> torch.Tensor:
    """Return the divergence over kept sets; one all-reduce of the kept logits of each side."""
    entries, flat = kept_entries(kept_tokens, policy.tokens, ignored, policy.vocab.vocab_size), ignored.reshape(-1)
    softmaxes = [
        kept_softmax(kept_logits(side.values, entries, side.vocab), entries, flat, temperature)
        for side in (policy, reference)
    ]
    dtype = statistics_dtype(torch.promote_types(policy.values.dtype, reference.values.dtype))
    divergence = kept_divergence(softmaxes[0], softmaxes[1], entries)
    return divergence.masked_fill(flat, 0).to(dtype).view(ignored.shape)


def _check_same_shard(policy: LocalLogits, reference: LocalLogits) -> None:
    if policy.values.shape != reference.values.shape or policy.tokens != reference.tokens:
        raise ShapeError(
            f"the policy's logits on this rank are {tuple(policy.values.shape)} and the reference's "
            f"{tuple(reference.values.shape)}; both must hold the same tokens and columns"
        )
    if policy.vocab != reference.vocab:
        raise PlacementError(
            f"the policy holds {_described(policy.vocab)} and the reference {_described(reference.vocab)}; shard both "
            "vocabularies the same way"
        )


def _described(shard: VocabColumns) -> str:
    where = "on one rank" if shard.group is None else f"over ranks {dist.get_process_group_ranks(shard.group)}"
    return f"columns {shard.start} to {shard.start + shard.width} of {shard.vocab_size} {where}"


def _topk_divergence(
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
    if fails(known.all(), "a teacher has no id with a probability at a token that counts"):
        raise OptionError(
            f"the teacher has no id with a probability at {int((~known).sum())} tokens that count; mask them, or count "
            f"the rest of the vocabulary with tail=True"
        )
    if fails((total <= 1 + ROUNDING).all(), "the probabilities of a teacher's ids sum to more than 1"):
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
