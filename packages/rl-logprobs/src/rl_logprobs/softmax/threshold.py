"""Order statistics of logits that are sharded on the vocabulary: the k-th largest, and the least of the top-p.

The search runs without gathering the vocabulary.  For a small ``k`` every rank sends its ``k`` largest logits.
Otherwise the logit is found byte by byte, by a radix selection over the bits of the logits' own dtype: the ranks add up
a histogram of counts or of probability, and the bin in which the cumulated sum crosses ``k`` or ``p`` gives the next
eight bits.  Two rounds for 16-bit logits, four for float32.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl_logprobs.softmax.log2_scale import TemperatureScale, log2_weights
from rl_logprobs.softmax.row_blocks import row_blocks, rows_per_workspace
from rl_logprobs.softmax.vocab_parallel import all_gather
from rl_logprobs.tensors import statistics_dtype, wide_dtype

BINS = 256
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

#: The summand of each logit of a block ``[rows, width]``, given the block's tokens.
_Summands = Callable[[torch.Tensor, slice], torch.Tensor]


@dataclass(frozen=True)
class ThresholdSearch:
    """Searches over each token's logits on all ranks of ``group``; results are ``[tokens]`` in the statistics dtype."""

    logits: torch.Tensor  # ``[..., width]``, this rank's columns without padding
    group: dist.ProcessGroup | None  # the ranks that share the vocabulary; None for one rank
    scale: TemperatureScale

    @property
    def _tokens(self) -> int:
        return self.logits.shape[:-1].numel()

    def max_logit(self) -> torch.Tensor:
        """Return the largest logit of each token; one collective."""
        maxima = self.logits.new_full((self._tokens,), -math.inf, dtype=statistics_dtype(self.logits.dtype))
        if self.logits.shape[-1]:
            for span, (block,) in self._blocks():
                maxima[span] = block.amax(-1)
        return self._all_reduce_(maxima, dist.ReduceOp.MAX)

    def largest(self, k: int) -> torch.Tensor:
        """Return the ``k`` largest logits of each token, ``[tokens, k]`` in descending order; one collective."""
        candidates = self.logits.new_full((self._tokens, k), -math.inf, dtype=statistics_dtype(self.logits.dtype))
        local_k = min(k, self.logits.shape[-1])
        for span, (block,) in self._blocks():
            candidates[span, :local_k] = block.topk(local_k, dim=1).values.to(candidates.dtype)
        return all_gather(candidates, self.group).transpose(0, 1).flatten(1).topk(k, dim=1).values

    def kth_largest(self, k: int) -> torch.Tensor:
        """Return the ``k``-th largest logit; one collective per byte of a logit."""

        def ones(block: torch.Tensor, span: slice) -> torch.Tensor:
            return torch.ones((), dtype=wide_dtype(block.device), device=block.device).expand(block.shape)

        return self._radix_select(ones, lambda total: torch.full_like(total, k))

    def top_p(self, p: float, max_logit: torch.Tensor, min_logit: torch.Tensor) -> torch.Tensor:
        """Return the least logit of the top-p: greater logits hold less than ``p`` of the probability."""
        # ``p`` is a part of the probability of the logits at or above ``min_logit``. One collective per byte of a
        # logit.

        def weights(block: torch.Tensor, span: slice) -> torch.Tensor:
            values = block.to(max_logit.dtype)
            below = values < min_logit[span, None]
            exponents = log2_weights(values, max_logit[span], self.scale.slice_tokens(span))
            return exponents.exp2_().masked_fill_(below, 0).to(wide_dtype(block.device))

        return self._radix_select(weights, lambda total: total * p)

    def top_p_among(self, largest: torch.Tensor, p: float, min_logit: torch.Tensor) -> torch.Tensor:
        """Return the result of ``top_p`` where a top-k has left only ``largest``, ``[tokens, k]``; one collective."""
        # Further logits that equal the last of ``largest`` count too.
        last = largest[:, -1:]
        ties = torch.zeros_like(last)
        for span, (block,) in self._blocks():
            ties[span] = (block.to(last.dtype) == last[span]).sum(1, keepdim=True).to(last.dtype)
        further_ties = self._all_reduce_(ties) - (largest == last).sum(1, keepdim=True)
        weights = log2_weights(largest, largest[:, 0], self.scale).exp2_()
        weights = weights.masked_fill_(largest < min_logit[:, None], 0).to(wide_dtype(largest.device))
        cumulated = weights.cumsum(1)
        goal = (cumulated[:, -1:] + further_ties * weights[:, -1:]) * p
        number_kept = (cumulated - weights < goal).sum(1, keepdim=True)
        return largest.gather(1, (number_kept - 1).clamp(min=0))[:, 0]

    def _blocks(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        width = self.logits.shape[-1]
        return row_blocks(rows_per_workspace(width, self.logits.device), self.logits) if width else iter(())

    def _all_reduce_(
        self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(values, operation, group=self.group)
        return values

    def _radix_select(self, summands: _Summands, goal_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the largest logit at which the summands of it and of all greater logits reach the goal."""
        # Works from the most significant byte to the least. ``prefix`` holds the bytes found so far as an integer, and
        # ``above`` the summands of all logits greater than those with this prefix. ``goal_of`` gives each token's goal
        # from the sum of all its summands.
        dtype = self.logits.dtype
        leading_byte = dtype.itemsize - 1
        above = torch.zeros(self._tokens, dtype=wide_dtype(self.logits.device), device=self.logits.device)
        prefix, negative, goal = above.long(), above.bool(), above
        for byte in range(leading_byte, -1, -1):
            is_leading = byte == leading_byte
            histogram = self._histogram(byte, None if is_leading else prefix, summands)
            if is_leading:
                goal = goal_of(histogram.sum(1))
            value, above = _crossing_bin(
                histogram, _ascending_bins(None if is_leading else negative, histogram), above, goal
            )
            if is_leading:
                negative = value >= BINS // 2
                value = value - BINS * negative  # the leading byte of an integer in two's complement
            prefix = prefix + (value << 8 * byte)
        return prefix.to(_INTEGERS[dtype.itemsize]).view(dtype).to(statistics_dtype(dtype))

    def _histogram(self, byte: int, prefix: torch.Tensor | None, summands: _Summands) -> torch.Tensor:
        """Return the sums of the summands for each value of a byte, ``[tokens, BINS]``, over all ranks."""
        # Counts logits with ``prefix`` as more significant bytes; all logits without ``prefix``.
        integers = _INTEGERS[self.logits.dtype.itemsize]
        histogram = torch.zeros(self._tokens, BINS, dtype=wide_dtype(self.logits.device), device=self.logits.device)
        for span, (block,) in self._blocks():
            block = block.contiguous()
            weights = summands(block, span)
            if prefix is not None:
                known = block.view(integers) & (-1 << 8 * (byte + 1))
                weights = weights * (known == prefix[span, None].to(integers))
            histogram[span].scatter_add_(1, _bytes(block, byte), weights)
        return self._all_reduce_(histogram)


def _crossing_bin(
    histogram: torch.Tensor, bins: torch.Tensor, above: torch.Tensor, goal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the byte value at which the sum from the greatest logits down reaches the goal, and the sum above."""
    # ``histogram`` and ``bins`` are ``[tokens, BINS]``, ``above`` is the sum over logits greater than all of these.
    at_or_above = histogram.gather(1, bins).flip(1).cumsum(1).flip(1) + above[:, None]
    greater = torch.cat([at_or_above[:, 1:], above[:, None]], 1)
    position = (greater >= goal[:, None]).sum(1, keepdim=True).clamp(max=BINS - 1)
    return bins.gather(1, position)[:, 0], greater.gather(1, position)[:, 0]


def _ascending_bins(negative: torch.Tensor | None, histogram: torch.Tensor) -> torch.Tensor:
    """Return the byte values ``[tokens, BINS]`` in ascending order of their logits."""
    # Ordering the bins costs less than mapping the bits of every logit to ordered integers. The bytes of ``negative``
    # logits descend where the logits ascend; None for the leading byte, which holds the sign.
    bins = torch.arange(BINS, device=histogram.device)
    if negative is None:
        return torch.cat([bins[BINS // 2 :].flip(0), bins[: BINS // 2]]).expand_as(histogram)
    return torch.where(negative[:, None], BINS - 1 - bins, bins)


def _bytes(block: torch.Tensor, byte: int) -> torch.Tensor:
    """Return one byte of each logit as int64; byte 0 is the least significant."""
    size = block.dtype.itemsize
    first = byte if sys.byteorder == "little" else size - 1 - byte
    return block.view(torch.uint8)[..., first::size].long()
