"""Log-probabilities of several tokens per position: a teacher's most probable, a student's at the same ids."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from rl_logprobs._torch_compat import apply_function, first_derivative
from rl_logprobs.errors import OptionError, ShapeError
from rl_logprobs.kept_tokens.entries import kept_entries, kept_logprobs_of, kept_softmax
from rl_logprobs.kept_tokens.kept_logits import kept_logits
from rl_logprobs.kept_tokens.kept_sets import KeptTokens
from rl_logprobs.softmax.log2_scale import TemperatureScale, check_temperature
from rl_logprobs.softmax.partial_softmax import LogitGradient, PartialSoftmax, TargetColumns, merge
from rl_logprobs.softmax.row_blocks import row_blocks, rows_per_workspace
from rl_logprobs.softmax.torch_kernels import reduce_logits, write_gradient
from rl_logprobs.softmax.vocab_parallel import all_gather
from rl_logprobs.softmax.vocab_shard import TokenSlice, VocabColumns, VocabShard, locate_logits
from rl_logprobs.targets import scored_targets
from rl_logprobs.tensors import require_same_device, statistics_dtype


class TopTokens(NamedTuple):
    """The most probable tokens of each position, in descending order of probability."""

    ids: torch.Tensor  # ``[..., k]`` int64 vocabulary ids
    logprobs: torch.Tensor  # ``[..., k]`` float32 (float64 for float64 logits) log-probabilities


@torch.no_grad()
def topk_logprobs(
    logits: torch.Tensor,
    k: int,
    *,
    shard: VocabShard | None = None,
    temperature: float | torch.Tensor = 1.0,
) -> TopTokens:
    """Return the ``k`` most probable tokens and their log-probabilities under ``softmax(logits / temperature)``.

    Exactly ``k`` tokens; of equal logits, the lower ids are taken, so that the result does not depend on how the
    vocabulary is sharded.  One collective.

    Args:
        logits: ``[..., tokens, vocab]``, plain, a DTensor or a local shard, as ``token_statistics`` takes them.
        k: number of tokens, from 1 to the size of the vocabulary.
        shard: which ids the columns of local logits are, or how many ids are no padding; see ``VocabShard``.
        temperature: positive number, or positive tensor that broadcasts to this rank's tokens.

    Returns:
        ``ids`` int64 and ``logprobs`` float32 (float64 for float64 logits), ``[..., k]``, normalised over the full
        vocabulary.

    Raises:
        LogprobsError: ``k`` is outside its range, or as ``token_statistics``, of the logits.

    Example:
        >>> import torch
        >>> from rl_logprobs import topk_logprobs
        >>> topk_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), k=2)
        TopTokens(ids=tensor([[1, 2]]), logprobs=tensor([[-0.4076, -1.4076]]))
    """
    located = locate_logits(logits, shard)
    vocab, shape = located.vocab, located.values.shape[:-1]
    if not 1 <= k <= vocab.vocab_size:
        raise OptionError(f"k must be from 1 to the vocabulary's {vocab.vocab_size}, got {k}")
    local = located.values[..., : vocab.width]
    no_target = torch.zeros(shape.numel(), dtype=torch.int64, device=local.device)
    scale = TemperatureScale.of(check_temperature(temperature, no_target.view(shape)), statistics_dtype(local.dtype))
    partial = reduce_logits(local, TargetColumns(no_target, no_target.bool()), scale, vocab.start)
    local_values, local_ids = _local_topk(local, k, vocab.start)
    stacked = partial.stack()
    gathered = all_gather(torch.cat([stacked, local_values.t(), local_ids.t().to(stacked.dtype)]), vocab.group)
    fields = stacked.shape[0]
    total = merge(partial.unstack(gathered[:, :fields]), scale)
    # Ranks hold ascending ids, so a stable sort of their candidates in rank order keeps equal logits by ascending id.
    candidates = gathered[:, fields:].view(-1, 2, k, shape.numel())
    values, ids = candidates.permute(1, 3, 0, 2).flatten(2)
    values, order = values.sort(dim=1, descending=True, stable=True)
    values, ids = values[:, :k], ids.gather(1, order[:, :k])
    logprobs = total.logprobs(values.t(), scale).t().to(values.dtype)
    return TopTokens(ids.long().view(*shape, k), logprobs.reshape(*shape, k))


def _local_topk(logits: torch.Tensor, k: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``k`` largest of this rank's columns and their ids, ``[tokens, k]``; ``-inf`` beyond its columns."""
    tokens, width = logits.shape[:-1].numel(), logits.shape[-1]
    values = logits.new_full((tokens, k), -math.inf, dtype=statistics_dtype(logits.dtype))
    ids = torch.zeros(tokens, k, dtype=torch.int64, device=logits.device)
    local_k = min(k, width)
    if local_k == 0:
        return values, ids
    for span, (block,) in row_blocks(rows_per_workspace(width, logits.device), logits):
        columns = _lowest_of_the_largest(block, local_k)
        largest = block.gather(1, columns)
        sorted_values, order = largest.sort(dim=1, descending=True, stable=True)
        values[span, :local_k] = sorted_values.to(values.dtype)
        ids[span, :local_k] = columns.gather(1, order) + start
    return values, ids


def _lowest_of_the_largest(block: torch.Tensor, k: int) -> torch.Tensor:
    """Return the columns of the ``k`` largest values in ascending order; for equal values the lowest columns."""
    width = block.shape[1]
    least = block.topk(k, dim=1).values[:, -1:]
    larger, equal = block > least, block == least
    room = k - larger.sum(1, keepdim=True)
    chosen = larger | (equal & (equal.cumsum(1) <= room))
    columns = torch.arange(width, device=block.device).expand_as(block).where(chosen, width)
    return columns.topk(k, dim=1, largest=False, sorted=True).values.clamp_(max=width - 1)


def logprobs_at(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    shard: VocabShard | None = None,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the log-probability of each of several ids at every position, under ``softmax(logits / temperature)``.

    One pass over the local logits and one collective forward, none backward.  With a teacher's ids and
    log-probabilities from ``topk_logprobs``, the divergence on the teacher's most probable tokens is
    ``(teacher.logprobs.exp() * (teacher.logprobs - logprobs_at(student_logits, teacher.ids))).sum(-1)``;
    ``.log_softmax(-1)`` of either renormalises it among these tokens.

    Args:
        logits: ``[..., tokens, vocab]``, plain, a DTensor or a local shard, as ``token_statistics`` takes them.
        ids: integers ``[..., k]`` with the leading dims of the logits: the full batch, or this rank's part where a
            DTensor shards the tokens.  Plain or DTensor, on the device of the logits.  An id may occur twice.
        shard: which ids the columns of local logits are, or how many ids are no padding; see ``VocabShard``.
        temperature: positive number, or positive tensor that broadcasts to this rank's tokens (without ``k``).
        ignore_index: id of entries that are not scored: value 0 and gradient 0.

    Returns:
        ``[..., k]`` for this rank's tokens, float32 (float64 for float64 logits), differentiable in the logits.
        An id with the logit ``-inf`` has ``-inf`` and no gradient.

    Raises:
        LogprobsError: as ``token_statistics``, of the logits and of the ids as targets.

    Example:
        >>> import torch
        >>> from rl_logprobs import logprobs_at
        >>> logprobs_at(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([[1, 2]]))
        tensor([[-0.4076, -1.4076]])
    """
    located = locate_logits(logits, shard)
    tokens = located.tokens
    if ids.dim() != len(tokens.full) + 1 or ids.shape[-1] == 0:
        raise ShapeError(f"ids must be {tokens.full} and a last dim of at least one id, got {tuple(ids.shape)}")
    require_same_device(logits=located.values, ids=ids)
    k = ids.shape[-1]
    entries = TokenSlice((*tokens.full, k), (*tokens.shape, k), (*tokens.offset, 0))
    scored = scored_targets(ids, entries, located.vocab.vocab_size, ignore_index=ignore_index)
    flat_temperature = check_temperature(temperature, scored.ids[..., 0])
    flat: torch.Tensor = apply_function(
        _LogprobsAt,
        located.values,
        scored.ids.reshape(-1, k),
        scored.ignored.reshape(-1, k),
        located.vocab,
        flat_temperature,
    )
    return flat.view(scored.ids.shape)


def kept_logprobs(
    logits: torch.Tensor,
    kept_tokens: KeptTokens,
    *,
    shard: VocabShard | None = None,
    temperature: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Return the log-probability of every kept id under the softmax over its kept set.

    With a teacher's log-probabilities of the same entries, distillation over kept sets is the sum over entries of
    ``teacher.exp() * (teacher - kept_logprobs(student_logits, kept_tokens))``.  ``KeptTokens.from_padded(top.ids)``
    keeps the ids of ``topk_logprobs``.

    Args:
        logits: ``[..., tokens, vocab]``, plain, a DTensor or a local shard, as ``token_statistics`` takes them.
        kept_tokens: one row per token of this rank's logits; empty rows have no entries.
        shard: which ids the columns of local logits are, or how many ids are no padding; see ``VocabShard``.
        temperature: positive number, or positive tensor that broadcasts to this rank's tokens.

    Returns:
        ``[entries]`` in the order of ``kept_tokens.ids``, float32 (float64 for float64 logits), differentiable, the
        same on every rank that holds these tokens.

    Raises:
        LogprobsError: as ``token_statistics``, of the logits and the kept tokens.

    Example:
        >>> import torch
        >>> from rl_logprobs import KeptTokens
        >>> from rl_logprobs.distillation import kept_logprobs
        >>> kept_logprobs(torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]]), KeptTokens.from_rows([[1, 2], [0]]))
        tensor([-0.3133, -1.3133,  0.0000])
    """
    located = locate_logits(logits, shard)
    tokens = TokenSlice.all_of(located.tokens.shape)
    require_same_device(logits=located.values, kept_tokens=kept_tokens.ids)
    unscored = torch.zeros(tokens.shape, dtype=torch.bool, device=located.values.device)
    flat_temperature = check_temperature(temperature, unscored)
    if kept_tokens.num_tokens == unscored.numel():
        unscored = (kept_tokens.offsets.diff() == 0).view(tokens.shape)
    entries = kept_entries(kept_tokens, tokens, unscored, located.vocab.vocab_size)
    values = kept_logits(located.values, entries, located.vocab)
    softmax = kept_softmax(values, entries, unscored.reshape(-1), flat_temperature)
    return kept_logprobs_of(softmax, entries).to(values.dtype)


class _LogprobsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        ids: torch.Tensor,
        ignored: torch.Tensor,
        shard: VocabColumns,
        temperature: float | torch.Tensor,
    ) -> torch.Tensor:
        scale = TemperatureScale.of(temperature, statistics_dtype(logits.dtype))
        columns = TargetColumns.locate(ids, ignored, shard.start, shard.width)
        parts = all_gather(_local_part(logits[..., : shard.width], columns, scale), shard.group)
        partial = PartialSoftmax(max_logit=parts[:, 0], sum_exp2=parts[:, 1], target_logit=parts[:, 2:])
        total = merge(partial, scale)
        logprobs = total.logprobs(total.target_logit, scale)
        no_gradient = (total.target_logit == -torch.inf).T | ignored
        ctx.save_for_backward(logits, ignored, no_gradient, *columns, total.max_logit.to(parts.dtype), total.sum_exp2)
        ctx.scale, ctx.width = scale, shard.width
        return logprobs.T.masked_fill(ignored, 0).to(parts.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, ignored, no_gradient, column, owned, max_logit, sum_exp2 = ctx.saved_tensors
        d_targets = gradients[0].to(sum_exp2.dtype).masked_fill(no_gradient, 0)
        target_coef = (d_targets.T * ctx.scale.inv_temperature).T
        gradient = LogitGradient(
            max_logit=max_logit,
            weight=(-target_coef.sum(-1) / sum_exp2).to(max_logit.dtype),
            weighted=None,
            target=target_coef.to(max_logit.dtype),
            ignored=ignored.all(-1),
            min_logit=None,
        )
        out = logits.new_empty(logits.shape)
        out[..., ctx.width :].zero_()
        columns = TargetColumns(column, owned)
        write_gradient(logits[..., : ctx.width], columns, gradient, ctx.scale, out[..., : ctx.width])
        return out, None, None, None, None


def _local_part(logits: torch.Tensor, columns: TargetColumns, scale: TemperatureScale) -> torch.Tensor:
    """Return ``[2 + k, tokens]``: largest logit, sum of weights, and the logits of the ids that this rank holds."""
    first = TargetColumns(columns.column[:, 0], columns.owned[:, 0])
    partial = reduce_logits(logits, first, scale, 0)
    chosen = torch.zeros_like(columns.column, dtype=partial.max_logit.dtype)
    if logits.shape[-1]:
        for span, (block,) in row_blocks(len(chosen), logits):
            chosen[span] = block.gather(1, columns.column[span]).to(chosen.dtype)
    return torch.cat([torch.stack([partial.max_logit, partial.sum_exp2]), chosen.where(columns.owned, 0).T])
