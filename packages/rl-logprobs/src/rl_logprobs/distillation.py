"""Log-probabilities of several tokens at each position, as a student needs them of its teacher's likely tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_logprobs._torch_compat import apply_function
from rl_logprobs.errors import OptionError, ShapeError
from rl_logprobs.layout import TokenSlice, VocabShard, locate_logits
from rl_logprobs.logprobs import checked_temperature
from rl_logprobs.powers import Scale
from rl_logprobs.rows import row_blocks, statistics_dtype
from rl_logprobs.softmax import LogitGradient, Sums, TargetColumns, column_sums, merge, write_gradient
from rl_logprobs.targets import ignored_targets, local_targets
from rl_logprobs.vocab_parallel import all_gather


def logprobs_at(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Log-probability of each of several ids at every position, under ``softmax(logits / temperature)``.

    One pass over the local logits and one collective forward, none backward.  With the ids and log-probabilities
    that ``topk_logprobs`` finds for a teacher, the divergence on the teacher's likely tokens is
    ``(teacher.logprobs.exp() * (teacher.logprobs - logprobs_at(student_logits, teacher.ids))).sum(-1)``;
    ``.log_softmax(-1)`` of either renormalises it among those tokens.

    Args:
        logits: as for ``token_logprobs``.
        ids: integers ``[..., k]``, the leading dims as for the targets of ``token_logprobs``; an id may recur.
        group: as for ``token_logprobs``.
        vocab_size: as there.
        vocab_start: as there.
        temperature: positive number, or positive tensor that broadcasts to this rank's tokens (without ``k``).
        ignore_index: the id of places that are not scored: value 0 and gradient 0.

    Returns:
        ``[..., k]`` for this rank's tokens, float32 (float64 for float64 logits), differentiable in the logits;
        an id whose logit is ``-inf`` has ``-inf`` and no gradient.

    Raises:
        ShapeError, PlacementError, DtypeError, OptionError, TargetError: as ``token_logprobs``.
    """
    located = locate_logits(logits, group=group, vocab_size=vocab_size, vocab_start=vocab_start)
    tokens = located.tokens
    if ids.dim() != len(tokens.full) + 1 or ids.shape[-1] == 0:
        raise ShapeError(f"ids must be {tokens.full} and a last dim of at least one id, got {tuple(ids.shape)}")
    if ids.device != located.values.device:
        raise OptionError(f"ids are on {ids.device} and logits on {located.values.device}; move the ids")
    k = ids.shape[-1]
    places = TokenSlice((*tokens.full, k), (*tokens.shape, k), (*tokens.offset, 0))
    mine = local_targets(ids, places, shift=False, ignore_index=ignore_index)
    ignored = ignored_targets(mine, vocab_size=located.vocab.vocab_size, ignore_index=ignore_index)
    heat = checked_temperature(temperature, mine[..., 0])
    flat: torch.Tensor = apply_function(
        _LogprobsAt, located.values, mine.reshape(-1, k), ignored.reshape(-1, k), located.vocab, heat
    )
    return flat.view(mine.shape)


class _LogprobsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        ids: torch.Tensor,
        ignored: torch.Tensor,
        shard: VocabShard,
        temperature: float | torch.Tensor,
    ) -> torch.Tensor:
        scale = Scale.of(temperature, statistics_dtype(logits.dtype))
        columns = TargetColumns.among(ids, ignored, shard.start, shard.width)
        parts = all_gather(_local_parts(logits[..., : shard.width], columns, scale), shard.group)
        whole = merge(Sums(peak=parts[:, 0], total=parts[:, 1], target=parts[:, 2:]), scale)
        logprobs = ((whole.target - whole.peak) * scale.exponent - whole.total.log2()) * scale.nats
        silent = (whole.target == -torch.inf).T | ignored
        ctx.save_for_backward(logits, ignored, silent, *columns, whole.peak.to(parts.dtype), whole.total)
        ctx.scale, ctx.width = scale, shard.width
        return logprobs.T.masked_fill(ignored, 0).to(parts.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, ignored, silent, column, owned, peak, total = ctx.saved_tensors
        per_logit = (gradients[0].to(total.dtype).masked_fill(silent, 0).T * ctx.scale.slope).T
        gradient = LogitGradient(
            peak=peak,
            power=(-per_logit.sum(-1) / total).to(peak.dtype),
            moment=None,
            target=per_logit.to(peak.dtype),
            ignored=ignored.all(-1),
            floor=None,
        )
        out = logits.new_empty(logits.shape)
        out[..., ctx.width :].zero_()
        columns = TargetColumns(column, owned)
        write_gradient(logits[..., : ctx.width], columns, gradient, ctx.scale, out[..., : ctx.width])
        return out, None, None, None, None


def _local_parts(logits: torch.Tensor, columns: TargetColumns, scale: Scale) -> torch.Tensor:
    """``[2 + k, tokens]``: peak, sum of weights and, where this rank holds them, the logits asked for."""
    first = TargetColumns(columns.column[:, 0], columns.owned[:, 0])
    sums = column_sums(logits, first, scale, 0)
    chosen = torch.zeros_like(columns.column, dtype=sums.peak.dtype)
    if logits.shape[-1]:
        for span, (block,) in row_blocks(len(chosen), logits):
            chosen[span] = block.gather(1, columns.column[span]).to(chosen.dtype)
    return torch.cat([torch.stack([sums.peak, sums.total]), chosen.where(columns.owned, 0).T])
