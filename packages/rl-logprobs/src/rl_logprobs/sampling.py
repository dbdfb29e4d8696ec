"""Choosing tokens from sharded logits: the most probable ones, or a sample, without gathering the vocabulary."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from rl_logprobs.errors import OptionError
from rl_logprobs.gumbel import gumbel_noise, token_keys
from rl_logprobs.layout import TokenSlice, locate_logits
from rl_logprobs.logprobs import checked_temperature
from rl_logprobs.powers import Scale
from rl_logprobs.rows import row_blocks, rows_that_fit, statistics_dtype, wide_dtype
from rl_logprobs.sampling_filter import SamplingFilter, sampling_floor
from rl_logprobs.softmax import TargetColumns, column_sums, merge
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
    sums = column_sums(local, places, scale, shard.start)
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
    seed: int | torch.Generator,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    temperature: float | torch.Tensor = 1.0,
    sampling: SamplingFilter | None = None,
) -> torch.Tensor:
    """Draw one token from each distribution, the same on every rank and for every number of ranks.

    The Gumbel-max trick (Maddison, Tarlow and Minka, arXiv:1411.0030): the argmax of logits plus Gumbel noise is a
    sample of their softmax, and an argmax is found with one collective.  The noise is a function of the seed, the
    token's place in the batch and the vocabulary id, so that no rank depends on what the others hold.

    Args:
        logits: as for ``token_logprobs``.
        seed: the same on all ranks and another for each call; or a CPU generator in the same state on all ranks, from
            which a seed is drawn.  Plain logits count their tokens' places from 0, so that data-parallel ranks need
            different seeds; a DTensor knows its tokens' places.
        group: as for ``token_logprobs``.
        vocab_size: as for ``token_logprobs``.
        vocab_start: as for ``token_logprobs``.
        temperature: as for ``token_logprobs``; for the most probable token take ``topk_logprobs(logits, 1)``.
        sampling: draw from what this filter keeps.

    Returns:
        Vocabulary ids of the logits' leading shape, int64.

    Raises:
        OptionError: also for a generator of an accelerator.
        ShapeError, PlacementError, DtypeError: as ``token_logprobs``.
    """
    located = locate_logits(logits, group=group, vocab_size=vocab_size, vocab_start=vocab_start)
    shard, shape, values = located.vocab, located.values.shape[:-1], located.values
    heat = checked_temperature(temperature, torch.zeros(shape, dtype=torch.int64, device=values.device))
    floor = None if sampling is None else sampling_floor(values, shard, heat, sampling)
    slope = Scale.of(heat, statistics_dtype(values.dtype)).slope
    streams = token_keys(_drawn(seed), _places(located.tokens, values.device))
    best = torch.full((2, shape.numel()), -math.inf, dtype=wide_dtype(values.device), device=values.device)
    if shard.width:
        mine = torch.arange(shard.start, shard.start + shard.width, device=values.device)
        for span, (block,) in row_blocks(rows_that_fit(shard.width, values.device), values[..., : shard.width]):
            keys = block.to(best.dtype) * (slope if isinstance(slope, float) else slope[span, None])
            if floor is not None:
                keys.masked_fill_(block.to(floor.dtype) < floor[span, None], -math.inf)
            best[0, span], winners = keys.add_(gumbel_noise(streams[span], mine)).max(-1)
            best[1, span] = mine[winners].to(best.dtype)
    keys, ids = all_gather(best, shard.group).unbind(1)
    return ids.gather(0, keys.argmax(0, keepdim=True))[0].long().view(shape)


def _drawn(seed: int | torch.Generator) -> int:
    if isinstance(seed, int):
        return seed
    if seed.device.type != "cpu":
        raise OptionError(f"the generator is on {seed.device}; pass a CPU generator or a number, so that no host waits")
    return int(torch.randint(-(1 << 63), (1 << 63) - 1, (), generator=seed))


def _places(tokens: TokenSlice, device: torch.device) -> torch.Tensor:
    """The place of each of this rank's tokens in the flattened batch."""
    whole = torch.arange(math.prod(tokens.full), device=device)
    return tokens.of(whole.view(tokens.full)).reshape(-1)
