"""Record the kept sets of a user's sampler, from the logits that it sampled from."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rl_logprobs.dtypes import statistics_dtype
from rl_logprobs.errors import OptionError
from rl_logprobs.sampling_filter import SamplingFilter, min_kept_logit
from rl_logprobs.softmax.log2_scale import check_temperature
from rl_logprobs.softmax.vocab_parallel import all_gather
from rl_logprobs.softmax.vocab_shard import VocabShard, locate_logits
from rl_logprobs.support.kept_sets import Support


@torch.no_grad()
def sampling_support(
    logits: torch.Tensor,
    sampling: SamplingFilter,
    *,
    shard: VocabShard | None = None,
    temperature: float | torch.Tensor = 1.0,
) -> Support:
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
        >>> from rl_logprobs import SamplingFilter, sampling_support
        >>> sampling_support(torch.tensor([[0.0, 2.0, 1.0]]), SamplingFilter(top_k=2)).ids
        tensor([1, 2])
    """
    located = locate_logits(logits, shard)
    if located.values.device.type == "meta":
        raise OptionError("logits are on the meta device, without values: the number of kept ids depends on them")
    vocab = located.vocab
    values = located.values[..., : vocab.width].flatten(0, -2)
    flat_temperature = check_temperature(temperature, values.new_zeros(located.values.shape[:-1]))
    wide = values.to(statistics_dtype(values.dtype))
    kept = wide > float("-inf")
    threshold = min_kept_logit(located.values, vocab, flat_temperature, sampling)
    if threshold is not None:
        kept &= wide >= threshold[:, None]
    rows, columns = kept.nonzero(as_tuple=True)
    rows, ids = _gather_ragged(torch.stack([rows, columns + vocab.start]), vocab.group)
    ids, order = ids.sort()
    rows, by_row = rows[order].sort(stable=True)
    counts = torch.bincount(rows, minlength=values.shape[0])
    return Support(ids[by_row], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def _gather_ragged(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return ``[2, entries]`` of all ranks; ranks have different numbers of entries."""
    if group is None:
        return part
    sizes = all_gather(part.new_tensor([[part.shape[1]]]), group).flatten().tolist()
    padded = part.new_zeros(2, max(sizes))
    padded[:, : part.shape[1]] = part
    gathered = all_gather(padded, group)
    return torch.cat([rank[:, :size] for rank, size in zip(gathered, sizes, strict=True)], dim=1)
