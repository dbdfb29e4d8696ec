"""Sums over the tokens of each sequence, for padded rows, packed rows and context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl_logprobs.errors import DtypeError, OptionError, ShapeError
from rl_logprobs.tensors import fails, is_integral, require_same_device, wide_dtype


def check_count(name: str, count: int) -> None:
    """Check a number of segments."""
    if not 1 <= count < 1 << 31:
        raise OptionError(f"{name} must be from 1 to 2**31 - 1, got {count}")


def check_mask(mask: torch.Tensor, **values: torch.Tensor) -> torch.Tensor:
    """Return the mask as bool, after a check that it and the values, by argument names, are of one shape."""
    name, first = next(iter(values.items()))
    for other, tensor in values.items():
        if not tensor.is_floating_point():
            raise DtypeError(f"{other} must be floating point, got {tensor.dtype}")
        if tensor.shape != first.shape:
            raise ShapeError(f"{name} {tuple(first.shape)} and {other} {tuple(tensor.shape)} differ")
    if mask.shape != first.shape:
        raise ShapeError(f"the mask has shape {tuple(mask.shape)} and the {name} {tuple(first.shape)}")
    require_same_device(**values, mask=mask)
    return mask != 0


@dataclass(frozen=True)
class Sequences:
    """The sequence of each token."""

    segments: torch.Tensor | None = None  # integers in ``[0, num_segments)``; None where each row is a sequence
    num_segments: int | None = None  # the number of segments; None without ``segments``
    # the ranks that hold other tokens of the same sequences, in rows of the same order or under the same segment
    # numbers; None where every sequence is on one rank
    cp_group: dist.ProcessGroup | None = None

    def check(self, mask: torch.Tensor) -> Sequences:
        """Return the sequences with segment 0 at masked tokens, after a check of shapes and numbers."""
        # On an accelerator the range of the segments is checked there.
        if mask.dim() == 0:
            raise ShapeError("the mask must be [..., tokens], got shape ()")
        if (self.segments is None) != (self.num_segments is None):
            raise OptionError("segments and num_segments belong together: give both, or neither for one row a sequence")
        if self.segments is None or self.num_segments is None:
            return self
        check_count("num_segments", self.num_segments)
        if not is_integral(self.segments.dtype):
            raise DtypeError(f"segments must be integers, got {self.segments.dtype}")
        if self.segments.shape != mask.shape:
            raise ShapeError(f"segments have shape {tuple(self.segments.shape)} and the mask {tuple(mask.shape)}")
        require_same_device(mask=mask, segments=self.segments)
        segments = self.segments.long().where(mask, 0)
        valid = (segments >= 0) & (segments < self.num_segments)
        if fails(valid.all(), f"a segment is outside [0, {self.num_segments})"):
            raise ShapeError(f"segment {segments[~valid][0].item()} is outside [0, {self.num_segments})")
        return Sequences(segments, self.num_segments, self.cp_group)

    @torch.no_grad()
    def totals(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of ``[quantities, *tokens]`` by sequence: ``[quantities, *rows]``, or by segment."""
        # In the widest dtype of the device; one all-reduce over ``cp_group``.
        wide = values.to(wide_dtype(values.device))
        if self.segments is None or self.num_segments is None:
            sums = wide.sum(-1)
        else:
            sums = wide.new_zeros(wide.shape[0], self.num_segments)
            sums.index_add_(1, self.segments.reshape(-1), wide.flatten(1))
        if self.cp_group is not None:
            dist.all_reduce(sums, group=self.cp_group)
        return sums

    @torch.no_grad()
    def maxima(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest of values ``[*tokens]`` by sequence, ``[*rows]`` or ``[segments]``."""
        if self.segments is None or self.num_segments is None:
            lowest = values.new_full((*values.shape[:-1], 1), -torch.inf)  # rows may have no tokens
            largest = torch.cat([values, lowest], dim=-1).amax(-1)
        else:
            largest = values.new_full((self.num_segments,), -torch.inf)
            largest.scatter_reduce_(0, self.segments.reshape(-1), values.reshape(-1), "amax")
        if self.cp_group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.cp_group)
        return largest

    def spread(self, per_sequence: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return each token's value of its sequence, in the shape of ``like``."""
        if self.segments is None:
            return per_sequence.unsqueeze(-1).expand_as(like)
        return per_sequence[self.segments]
