"""Choosing tokens from sharded logits: the most probable ones, or a sample, without gathering the vocabulary."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from rl_logprobs.errors import OptionError
from rl_logprobs.layout import locate_logits
from rl_logprobs.logprobs import checked_temperature
from rl_logprobs.rows import row_blocks, rows_that_fit, statistics_dtype
from rl_logprobs.sampling_filter import SamplingFilter, sampling_floor
from rl_logprobs.softmax import Scale, TargetColumns, column_sums, merge
from rl_logprobs.vocab_parallel import all_gather


class TopTokens(NamedTuple):
    """The most probable tokens, ``[..., k]`` from the most probable down: vocabulary ids and log-probabilities."""

    ids: torch.Tensor
    logprobs: torch.Tensor


@torch.no_grad()
def topk_logprobs(
    logits: torch.Tensor,
    k: int,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    temperature: float | torch.Tensor = 1.0,
) -> TopTokens:
    """The ``k`` most probable tokens and their log-probabilities, such as a teacher hands to a student.

    Exactly ``k``, of equal logits those with the lower ids, so that every split of the vocabulary gives the same.
    One collective.

    Args:
        logits: as for ``token_logprobs``.
        k: from 1 to the vocabulary's size.
        group: as for ``token_logprobs``.
        vocab_size: as for ``token_logprobs``.
        vocab_start: as for ``token_logprobs``.
        temperature: as for ``token_logprobs``.

    Returns:
        ``ids`` int64 and ``logprobs`` float32 (float64), ``[..., k]``, relative to the whole vocabulary.

    Raises:
        OptionError: ``k`` is outside the vocabulary.
        ShapeError, PlacementError, DtypeError: as ``token_logprobs``.
    """
    located = locate_logits(logits, group=group, vocab_size=vocab_size, vocab_start=vocab_start)
    shard, shape = located.vocab, located.values.shape[:-1]
    if not 1 <= k <= shard.vocab_size:
        raise OptionError(f"k must be from 1 to the vocabulary's {shard.vocab_size}, got {k}")
    local = located.values[..., : shard.width]
    nobody = torch.zeros(shape.numel(), dtype=torch.int64, device=local.device)
    scale = Scale.of(checked_temperature(temperature, nobody.view(shape)), statistics_dtype(local.dtype))
    places = TargetColumns(nobody, nobody.bool())
    sums = column_sums(local, places, scale, shard.start, moment=False, best=False)
    values, ids = _local_topk(local, k, shard.start)
    parts = torch.cat([sums.stack(), values.t(), ids.t().to(values.dtype)])
    gathered = all_gather(parts, shard.group)
    quantities = sums.stack().shape[0]
    whole = merge(sums.unstack(gathered[:, :quantities]), scale)
    # Ranks hold rising ids, so a stable sort over the ranks in order leaves equal logits by rising id.
    candidates = gathered[:, quantities:].view(-1, 2, k, shape.numel())
    values, ids = candidates.permute(1, 3, 0, 2).flatten(2)
    values, order = values.sort(dim=1, descending=True, stable=True)
    values, ids = values[:, :k], ids.gather(1, order[:, :k])
    exponent = scale.exponent if isinstance(scale.exponent, float) else scale.exponent[:, None]
    nats = scale.nats if isinstance(scale.nats, float) else scale.nats[:, None]
    gap = (values - whole.peak[:, None]) * exponent
    logprobs = ((gap - whole.total.log2()[:, None]) * nats).to(values.dtype)
    return TopTokens(ids.long().view(*shape, k), logprobs.view(*shape, k))


def _local_topk(logits: torch.Tensor, k: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest of this rank's columns with their ids, ``[tokens, k]``; ``-inf`` where it has fewer."""
    tokens, width = logits.shape[:-1].numel(), logits.shape[-1]
    values = logits.new_full((tokens, k), -math.inf, dtype=statistics_dtype(logits.dtype))
    ids = torch.zeros(tokens, k, dtype=torch.int64, device=logits.device)
    mine = min(k, width)
    if mine == 0:
        return values, ids
    for span, (block,) in row_blocks(rows_that_fit(width, logits.device), logits):
        columns = _lowest_of_the_largest(block, mine)
        found = block.gather(1, columns)
        sorted_values, order = found.sort(dim=1, descending=True, stable=True)
        values[span, :mine] = sorted_values.to(values.dtype)
        ids[span, :mine] = columns.gather(1, order) + start
    return values, ids


def _lowest_of_the_largest(block: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the ``k`` largest values in rising order, the lowest of those that tie with the last."""
    width = block.shape[1]
    least = block.topk(k, dim=1).values[:, -1:]
    larger, equal = block > least, block == least
    room = k - larger.sum(1, keepdim=True)
    kept = larger | (equal & (equal.cumsum(1) <= room))
    columns = torch.arange(width, device=block.device).expand_as(block).where(kept, width)
    return columns.topk(k, dim=1, largest=False, sorted=True).values.clamp_(max=width - 1)


@torch.no_grad()
def sample_tokens(
    logits: torch.Tensor,
    *,
    seed: int,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    temperature: float | torch.Tensor = 1.0,
    sampling: SamplingFilter | None = None,
) -> torch.Tensor:
    """Draw one token from each distribution, the same on every rank of the vocabulary's group.

    The Gumbel-max trick (Gumbel, 1954): the argmax of logits plus Gumbel noise is a sample of their softmax, and
    an argmax is found with one collective.

    Args:
        logits: as for ``token_logprobs``.
        seed: the same on all ranks of the vocabulary's group, and another for each call and each data-parallel
            rank; every rank makes its own columns' noise from it.
        group: as for ``token_logprobs``.
        vocab_size: as for ``token_logprobs``.
        vocab_start: as for ``token_logprobs``.
        temperature: as for ``token_logprobs``.
        sampling: draw from what this filter keeps.

    Returns:
        Vocabulary ids of the logits' leading shape, int64.

    Raises:
        ShapeError, PlacementError, DtypeError, OptionError: as ``token_logprobs``.
    """
    located = locate_logits(logits, group=group, vocab_size=vocab_size, vocab_start=vocab_start)
    shard, shape, values = located.vocab, located.values.shape[:-1], located.values
    heat = checked_temperature(temperature, torch.zeros(shape, dtype=torch.int64, device=values.device))
    floor = None if sampling is None else sampling_floor(values, shard, heat, sampling)
    dtype = statistics_dtype(values.dtype)
    slope = Scale.of(heat, dtype).slope
    best = torch.full((2, shape.numel()), -math.inf, dtype=dtype, device=values.device)
    if shard.width:
        rank = 0 if shard.group is None else dist.get_rank(shard.group)
        generator = torch.Generator(values.device).manual_seed(_mix(seed, rank))
        for span, (block,) in row_blocks(rows_that_fit(shard.width, values.device), values[..., : shard.width]):
            keys = block.to(dtype) * (slope if isinstance(slope, float) else slope[span, None].to(dtype))
            if floor is not None:
                keys.masked_fill_(block.to(dtype) < floor[span, None], -math.inf)
            noise = torch.empty_like(keys).exponential_(generator=generator)
            best[0, span], winners = keys.sub_(noise.log_()).max(-1)
            best[1, span] = (winners + shard.start).to(dtype)
    keys, ids = all_gather(best, shard.group).unbind(1)
    return ids.gather(0, keys.argmax(0, keepdim=True))[0].long().view(shape)


def _mix(seed: int, rank: int) -> int:
    """A seed for each rank, far from those of neighbouring seeds (the finaliser of SplitMix64)."""
    mask = 2**64 - 1
    state = (seed + (rank + 1) * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return (state ^ (state >> 31)) >> 1
