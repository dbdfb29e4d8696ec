"""Sample tokens from sharded logits without gathering the vocabulary."""

from __future__ import annotations

import math

import torch

from rl_logprobs.dtypes import statistics_dtype, wide_dtype
from rl_logprobs.errors import OptionError
from rl_logprobs.sampling_filter import SamplingFilter, min_kept_logit
from rl_logprobs.softmax.gumbel import gumbel_noise, token_keys
from rl_logprobs.softmax.log2_scale import TemperatureScale, check_temperature
from rl_logprobs.softmax.row_blocks import row_blocks, rows_per_workspace
from rl_logprobs.softmax.vocab_parallel import all_gather
from rl_logprobs.softmax.vocab_shard import TokenSlice, VocabShard, locate_logits


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
        OptionError: an option is outside its range, or ``shard`` has a group for a DTensor.
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
    keys = token_keys(_seed_from(seed), _token_positions(located.tokens, values.device))
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


def _seed_from(seed: int | torch.Generator) -> int:
    if isinstance(seed, int):
        return seed
    if seed.device.type != "cpu":
        raise OptionError(
            f"the generator is on {seed.device}; pass a CPU generator or a number, so that the host does not wait"
        )
    return int(torch.randint(-(1 << 63), (1 << 63) - 1, (), generator=seed))


def _token_positions(tokens: TokenSlice, device: torch.device) -> torch.Tensor:
    """Return the position of each of this rank's tokens in the flattened full batch."""
    positions = torch.arange(math.prod(tokens.full), device=device)
    return tokens.local(positions.view(tokens.full)).reshape(-1)
