"""Check input samples: token ids, and masks of the tokens that count in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, lcm

import torch
from torch import Tensor

from fsdp_runtime.errors import OptionError, SampleError
from fsdp_runtime.steps.routing.routes import is_integer

#: Token ids of one sample.
TokenIds = Tensor | Sequence[int]
#: The work of one attended pair of tokens in units of a token's other work: ``1 / (6 * hidden_size)`` (a pair costs
#: ``4 * hidden_size`` operations per layer, a token ``24 * hidden_size ** 2``), here for a hidden size of 4096.
PAIR_COST = 1 / (6 * 4096)
#: The largest number of ranks: each rank gets rows, empty rows if samples are few.
MAX_RANKS = 2**20


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of tokens."""

    token_ids: Tensor  # ``[length]`` int64, contiguous, on the CPU
    length: int
    loss_mask: Tensor | None  # ``[length]`` bool, ``None`` if all tokens count

    @property
    def scored(self) -> Tensor:
        """``[length]`` bool, the tokens that count in the loss; never the first token, which no token predicts."""
        scored = torch.ones(self.length, dtype=torch.bool) if self.loss_mask is None else self.loss_mask.clone()
        scored[0] = False
        return scored


def read_sample(token_ids: TokenIds, loss_mask: TokenIds | None, name: str) -> Sample:
    """Check one sample: integer token ids, and a loss mask; error messages call the sample ``name``."""
    ids = torch.as_tensor(token_ids)
    shape = tuple(ids.shape)
    if len(shape) != 1 or not shape[0] or not is_integer(ids):
        raise SampleError(f"{name} is {shape} of {ids.dtype}: give [length] integers, at least one")
    mask = None if loss_mask is None else torch.as_tensor(loss_mask).detach().cpu() != 0
    if mask is not None and tuple(mask.shape) != shape:
        raise SampleError(f"{name} has {shape[0]} tokens and a loss mask {tuple(mask.shape)}: give one entry per token")
    return Sample(ids.detach().to("cpu", torch.int64).contiguous(), shape[0], mask)


@dataclass(frozen=True)
class RowSizes:
    """The allowed lengths of rows."""

    capacity: int  # the largest length
    step: int  # divides every other length

    def padded(self, tokens: int) -> int:
        """Return the padded length of a row with ``tokens`` tokens."""
        return min(max(-(-tokens // self.step), 1) * self.step, self.capacity)


def row_sizes(
    budget: int, ranks: int, cp: int, multiple_of: int, *, distinct_lengths: int, pair_cost: float
) -> RowSizes:
    """Check the options of packing; return the lengths of rows with at most ``budget`` tokens per rank of ``cp``."""
    numbers = {"ranks": ranks, "budget": budget, "cp": cp, "multiple_of": multiple_of}
    for name, value in {**numbers, "distinct_lengths": distinct_lengths}.items():
        if type(value) is not int or value < 1:
            raise OptionError(f"{name}={value!r}: give a positive integer")
    if ranks > MAX_RANKS:
        raise OptionError(f"ranks={ranks}: give at most {MAX_RANKS}, as submesh(mesh, 'dp').size()")
    if not 0 <= pair_cost < inf:
        raise OptionError(f"pair_cost={pair_cost!r}: give a finite number, 0 or more")
    unit = multiple_of if cp == 1 else lcm(multiple_of, 2 * cp)  # the chunks of load balancer headtail
    capacity = budget * cp // unit * unit
    if not capacity:
        raise OptionError(
            f"budget={budget} with cp={cp} has no room for a row. Its length must be a multiple of {unit}: give a "
            f"budget of {-(-unit // cp)} or more"
        )
    return RowSizes(capacity, -(-capacity // (distinct_lengths * unit)) * unit)
