"""Sample tokens from sharded logits without gathering the vocabulary, and record the ids that a sampler kept."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from rl_logprobs.errors import OptionError
from rl_logprobs.kept_tokens.kept_sets import KeptTokens
from rl_logprobs.sampling_filter import SamplingFilter, min_kept_logit
from rl_logprobs.softmax.gumbel import gumbel_noise, token_keys
from rl_logprobs.softmax.log2_scale import TemperatureScale, check_temperature
from rl_logprobs.softmax.row_blocks import row_blocks, rows_per_workspace
from rl_logprobs.softmax.vocab_parallel import all_gather
from rl_logprobs.softmax.vocab_shard import VocabShard, locate_logits
from rl_logprobs.tensors import statistics_dtype, wide_dtype


@torch.no_grad()
def sample_tokens(
    logits: torch.Tensor,
    *,
    seed: int | torch.Generator,
    shard: VocabShard | None = None,
    temperature: float | torch.Tensor = 1.0,
    sampling: SamplingFilter | None = None,
) -> torch.Tensor:
    """Sample one token from each distribution, the same token on every rank and for every number of ranks.

    The Gumbel-max trick (Maddison, Tarlow and Minka, arXiv:1411.0030): the argmax of logits plus Gumbel noise is a
    sample of their softmax, and an argmax needs one collective.  The noise is a function of the seed, the token's
    position in the batch and the vocabulary id, so that it does not depend on how the logits are sharded.

    Args:
        logits: ``[..., tokens, vocab]``, plain, a DTensor or a local shard, as ``token_statistics`` takes them.
        seed: a number, the same on all ranks and a new one for each call; or a CPU generator in the same state on all
            ranks, from which a seed is drawn.  Positions in plain logits start at 0, so data-parallel ranks need
            different seeds; a DTensor gives its tokens' positions in the full batch.
        shard: which ids the columns of local logits are, or how many ids are no padding; see ``VocabShard``.
        temperature: positive number, or positive tensor that broadcasts to this rank's tokens.  For greedy sampling
            use ``topk_logprobs(logits, 1)``.
        sampling: sample from the tokens that this filter keeps.

    Returns:
        Vocabulary ids of the logits' leading shape, int64; -1 where no token can be sampled, because a logit is NaN or
        all are ``-inf``.  To check costs a host synchronisation and is left to the caller: ``(ids < 0).any()``.

    Raises:
        LogprobsError: as ``token_statistics``, of the logits.

    Example:
        >>> import torch
        >>> from rl_logprobs import SamplingFilter, sample_tokens
        >>> logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
        >>> sample_tokens(logits, seed=0, temperature=0.7, sampling=SamplingFilter(top_p=0.9))
        tensor([0, 2])
    """
    located = locate_logits(logits, shard)
    vocab, shape, values = located.vocab, located.values.shape[:-1], located.values
    per_token = torch.zeros(shape, dtype=torch.int64, device=values.device)
    flat_temperature = check_temperature(temperature, per_token)
    min_logit = min_kept_logit(values, vocab, flat_temperature, sampling)
    inv_temperature = TemperatureScale.of(flat_temperature, statistics_dtype(values.dtype)).inv_temperature
    positions = torch.arange(math.prod(located.tokens.full), device=values.device).view(located.tokens.full)
    keys = token_keys(_seed_from(seed), located.tokens.local(positions).reshape(-1))
    # Row 0: each token's largest logit plus noise; row 1: its vocabulary id.
    best = torch.full((2, shape.numel()), -math.inf, dtype=wide_dtype(values.device), device=values.device)
    if vocab.width:
        ids = torch.arange(vocab.start, vocab.start + vocab.width, device=values.device)
        for span, (block,) in row_blocks(rows_per_workspace(vocab.width, values.device), values[..., : vocab.width]):
            factor = inv_temperature if isinstance(inv_temperature, float) else inv_temperature[span, None]
            noisy = block.to(best.dtype) * factor
            if min_logit is not None:
                noisy.masked_fill_(block.to(min_logit.dtype) < min_logit[span, None], -math.inf)
            best[0, span], columns = noisy.add_(gumbel_noise(keys[span], ids)).max(-1)
            best[1, span] = ids[columns].to(best.dtype)
    noisy_logits, winners = all_gather(best, vocab.group).unbind(1)
    winner = winners.gather(0, noisy_logits.argmax(0, keepdim=True))[0]
    possible = noisy_logits.amax(0) > -math.inf  # False for NaN too
    return torch.where(possible, winner, -1).long().view(shape)


@torch.no_grad()
def sampling_mask(
    logits: torch.Tensor,
    sampling: SamplingFilter,
    *,
    shard: VocabShard | None = None,
    temperature: float | torch.Tensor = 1.0,
) -> KeptTokens:
    """Return the ids that a filter keeps, to be replayed where the sampled tokens are scored.

    For a user's own generator; vLLM and SGLang return kept sets themselves.  The host waits for the number of ids.

    Args:
        logits: ``[..., tokens, vocab]``, plain, a DTensor or a local shard, as ``token_statistics`` takes them.
        sampling: the sampler's filter.
        shard: which ids the columns of local logits are, or how many ids are no padding; see ``VocabShard``.
        temperature: positive number, or positive tensor that broadcasts to this rank's tokens.

    Returns:
        One row per token of this rank's logits, ids ascending, the same on every rank of the vocabulary.  A row is
        empty where all logits are ``-inf``.

    Raises:
        OptionError: the temperature is not positive, ``shard`` has a group for a DTensor, or the logits
            are on the meta device.
        LogprobsError: as ``token_statistics``, of the logits.

    Example:
        >>> import torch
        >>> from rl_logprobs import SamplingFilter, sampling_mask
        >>> sampling_mask(torch.tensor([[0.0, 2.0, 1.0]]), SamplingFilter(top_k=2)).ids
        tensor([1, 2])
    """
    located = locate_logits(logits, shard)
    if located.values.device.type == "meta":
        raise OptionError("logits are on the meta device, without values: the number of kept ids depends on them")
    vocab = located.vocab
    values = located.values[..., : vocab.width].flatten(0, -2)
    flat_temperature = check_temperature(temperature, values.new_zeros(located.values.shape[:-1]))
    wide = values.to(statistics_dtype(values.dtype))
    chosen = wide > float("-inf")
    threshold = min_kept_logit(located.values, vocab, flat_temperature, sampling)
    if threshold is not None:
        chosen &= wide >= threshold[:, None]
    rows, columns = chosen.nonzero(as_tuple=True)
    rows, ids = _gather_ragged(torch.stack([rows, columns + vocab.start]), vocab.group)
    ids, order = ids.sort()
    rows, by_row = rows[order].sort(stable=True)
    counts = torch.bincount(rows, minlength=values.shape[0])
    return KeptTokens(ids[by_row], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def _seed_from(seed: int | torch.Generator) -> int:
    if isinstance(seed, int):
        return seed
    if seed.device.type != "cpu":
        raise OptionError(
            f"the generator is on {seed.device}; pass a CPU generator or a number, so that the host does not wait"
        )
    return int(torch.randint(-(1 << 63), (1 << 63) - 1, (), generator=seed))


def _gather_ragged(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return ``[2, entries]`` of all ranks; ranks have different numbers of entries."""
    if group is None:
        return part
    sizes = all_gather(part.new_tensor([[part.shape[1]]]), group).flatten().tolist()
    padded = part.new_zeros(2, max(sizes))
    padded[:, : part.shape[1]] = part
    gathered = all_gather(padded, group)
    return torch.cat([rank[:, :size] for rank, size in zip(gathered, sizes, strict=True)], dim=1)
