"""Top-k, top-p and min-p as one threshold a token, found without gathering the vocabulary.

A filter keeps the logits at or above some value.  For a small ``k`` every rank offers its ``k`` largest logits, and
the value is among them, for top-p after top-k too.  Otherwise it is found digit by digit (a radix selection over the
bits of the logits' own dtype): the ranks add up a histogram of counts or of probability, and the bin in which
the cumulated sum crosses ``k`` or ``p`` names the next eight bits.  Two rounds for 16-bit logits, four for
float32.

Ties at the threshold are all kept, as vLLM and transformers do for top-k; for top-p they keep whichever of the
tied tokens their sort puts first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from rl_logprobs.errors import OptionError
from rl_logprobs.layout import VocabShard
from rl_logprobs.powers import Scale, powers
from rl_logprobs.rows import row_blocks, rows_that_fit, statistics_dtype, wide_dtype
from rl_logprobs.vocab_parallel import all_gather

BINS = 256
#: Up to this ``k`` the ranks exchange their ``k`` largest logits of each token.
FEW = 256
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SamplingFilter:
    """Which tokens a sampler may choose, after the temperature.

    Attributes:
        top_k: keep the ``k`` largest logits (and ties with the last); None keeps all.
        top_p: keep the most probable tokens that together reach this probability, among those that ``top_k``
            kept (Holtzman et al., arXiv:1904.09751); 1 keeps all.
        min_p: keep tokens at least this probable relative to the most probable (Nguyen et al.,
            arXiv:2407.01082); 0 keeps all.
        order: ``"vllm"`` applies min-p, top-k, top-p; ``"transformers"`` top-k, top-p, min-p.  It matters where
            min-p removes what top-p would have counted.

    Raises:
        OptionError: a number outside its range, or another order.
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    order: Literal["vllm", "transformers"] = "vllm"

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise OptionError(f"top_k must be 1 or more, got {self.top_k}; leave it out to keep all tokens")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.order not in ("vllm", "transformers"):
            raise OptionError(f"order must be 'vllm' or 'transformers', got {self.order!r}")


@torch.no_grad()
def sampling_floor(
    logits: torch.Tensor, shard: VocabShard, temperature: float | torch.Tensor, sampling: SamplingFilter
) -> torch.Tensor | None:
    """The least logit that the filter keeps, ``[tokens]`` in the statistics dtype; None if it keeps all.

    Up to a top-k of ``FEW``, one collective and another for top-p.  Otherwise one for the peak and one a round for
    each of top-k and top-p.

    Args:
        logits: ``[..., columns]``, this rank's columns.
        shard: which columns these are; the ranks of its group call together.
        temperature: positive number, or one number a token (flat).
        sampling: the filter.
    """
    if sampling.top_k is None and sampling.top_p == 1 and sampling.min_p == 0:
        return None
    dtype = statistics_dtype(logits.dtype)
    selection = _Selection(logits[..., : shard.width], shard.group, Scale.of(temperature, dtype))
    top_k = None if sampling.top_k is None or sampling.top_k >= shard.vocab_size else sampling.top_k
    few = selection.largest(top_k) if top_k is not None and top_k <= FEW else None
    peak = selection.peak() if few is None else few[:, 0]
    relative = torch.full_like(peak, -math.inf)
    if sampling.min_p > 0:
        relative = peak + (math.log(sampling.min_p) / selection.scale.slope if sampling.min_p < 1 else 0.0)
    floor = relative if sampling.order == "vllm" else torch.full_like(peak, -math.inf)
    if top_k is not None:
        floor = torch.maximum(floor, selection.at_count(top_k) if few is None else few[:, -1])
    if sampling.top_p < 1 and few is None:
        floor = torch.maximum(floor, selection.at_mass(sampling.top_p, peak, floor))
    elif sampling.top_p < 1 and few is not None:
        floor = torch.maximum(floor, selection.at_mass_among(few, sampling.top_p, floor))
    return torch.maximum(floor, relative).to(dtype)


@dataclass(frozen=True)
class _Selection:
    """Selection among the logits of all ranks, byte by byte of their bits, which order floats of one sign."""

    logits: torch.Tensor
    group: dist.ProcessGroup | None
    scale: Scale

    @property
    def _tokens(self) -> int:
        return self.logits.shape[:-1].numel()

    def _sum_(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(values, operation, group=self.group)
        return values

    def peak(self) -> torch.Tensor:
        """The largest logit of each token over all ranks, in the statistics dtype."""
        peak = self.logits.new_full((self._tokens,), -math.inf, dtype=statistics_dtype(self.logits.dtype))
        if self.logits.shape[-1]:
            for span, (block,) in self._blocks():
                peak[span] = block.amax(-1)
        return self._sum_(peak, dist.ReduceOp.MAX)

    def largest(self, count: int) -> torch.Tensor:
        """The ``count`` largest logits of each token over all ranks in falling order, in the statistics dtype."""
        offered = self.logits.new_full((self._tokens, count), -math.inf, dtype=statistics_dtype(self.logits.dtype))
        mine = min(count, self.logits.shape[-1])
        for span, (block,) in self._blocks():
            offered[span, :mine] = block.topk(mine, dim=1).values.to(offered.dtype)
        return all_gather(offered, self.group).transpose(0, 1).flatten(1).topk(count, dim=1).values

    def at_count(self, count: int) -> torch.Tensor:
        """The ``count``-th largest logit."""
        return self._select(lambda sums: torch.full_like(sums, count), None, None)

    def at_mass(self, share: float, peak: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
        """The least logit above which less than ``share`` of the probability at or above ``floor`` lies."""
        return self._select(lambda sums: sums * share, peak, floor)

    def at_mass_among(self, largest: torch.Tensor, share: float, floor: torch.Tensor) -> torch.Tensor:
        """``at_mass`` where only these (the largest, falling) and what ties with the last of them are left."""
        last = largest[:, -1:]
        ties = torch.zeros_like(last)
        for span, (block,) in self._blocks():
            ties[span] = (block.to(last.dtype) == last[span]).sum(1, keepdim=True).to(last.dtype)
        further = self._sum_(ties) - (largest == last).sum(1, keepdim=True)
        weights = powers(largest, largest[:, 0], self.scale).exp2_()
        weights = weights.masked_fill_(largest < floor[:, None], 0).to(wide_dtype(largest.device))
        cumulated = weights.cumsum(1)
        goal = (cumulated[:, -1:] + further * weights[:, -1:]) * share
        kept = (cumulated - weights < goal).sum(1, keepdim=True)
        return largest.gather(1, (kept - 1).clamp(min=0))[:, 0]

    def _blocks(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        width = self.logits.shape[-1]
        return row_blocks(rows_that_fit(width, self.logits.device), self.logits) if width else iter(())

    def _weights(
        self, block: torch.Tensor, span: slice, peak: torch.Tensor | None, floor: torch.Tensor | None
    ) -> torch.Tensor:
        """What each logit adds to the sum: one, or its weight if it is at or above the floor."""
        wide = wide_dtype(block.device)
        if peak is None or floor is None:
            return torch.ones((), dtype=wide, device=block.device).expand(block.shape)
        values = block.to(peak.dtype)
        below = values < floor[span, None]
        return powers(values, peak[span], self.scale.rows(span)).exp2_().masked_fill_(below, 0).to(wide)

    def _select(
        self,
        goal_of: Callable[[torch.Tensor], torch.Tensor],
        peak: torch.Tensor | None,
        floor: torch.Tensor | None,
    ) -> torch.Tensor:
        """The largest logit that, with all larger ones, adds up to what ``goal_of`` makes of the sum of all.

        Histograms count the bytes as they are; putting their bins in the order of the logits is cheaper than that of
        every logit.
        """
        wide, integers = wide_dtype(self.logits.device), _INTEGERS[self.logits.dtype.itemsize]
        above = torch.zeros(self._tokens, dtype=wide, device=self.logits.device)
        prefix, negative, goal = above.long(), above.bool(), above
        places = range(self.logits.dtype.itemsize)
        for place in reversed(places):
            histogram = above.new_zeros(len(above), BINS)
            for span, (block,) in self._blocks():
                block = block.contiguous()
                weights = self._weights(block, span, peak, floor)
                if place != places[-1]:
                    known = block.view(integers) & (-1 << 8 * (place + 1))
                    weights = weights * (known == prefix[span, None].to(integers))
                histogram[span].scatter_add_(1, _bytes(block, place), weights)
            histogram = self._sum_(histogram)
            if place == places[-1]:
                goal = goal_of(histogram.sum(1))
            order = _rising_bins(None if place == places[-1] else negative, histogram)
            at_or_above = histogram.gather(1, order).flip(1).cumsum(1).flip(1) + above[:, None]
            larger = torch.cat([at_or_above[:, 1:], above[:, None]], 1)
            bin_ = (larger >= goal[:, None]).sum(1, keepdim=True).clamp(max=BINS - 1)
            above, digit = larger.gather(1, bin_)[:, 0], order.gather(1, bin_)[:, 0]
            if place == places[-1]:
                negative = digit >= BINS // 2
                digit = digit - BINS * negative
            prefix = prefix + (digit << 8 * place)
        return prefix.to(integers).view(self.logits.dtype).to(statistics_dtype(self.logits.dtype))


def _rising_bins(negative: torch.Tensor | None, histogram: torch.Tensor) -> torch.Tensor:
    """The bytes of each token in the order of the logits that they belong to, ``[tokens, BINS]``.

    Bytes of negative logits fall where the logits rise; the leading ones (``negative`` None) hold the sign.
    """
    bins = torch.arange(BINS, device=histogram.device)
    if negative is None:
        return torch.cat([bins[BINS // 2 :].flip(0), bins[: BINS // 2]]).expand_as(histogram)
    return torch.where(negative[:, None], BINS - 1 - bins, bins)


def _bytes(block: torch.Tensor, place: int) -> torch.Tensor:
    """One byte of each logit, int64; ``place`` 0 is the least significant."""
    size = block.dtype.itemsize
    first = place if sys.byteorder == "little" else size - 1 - place
    return block.view(torch.uint8)[..., first::size].long()
