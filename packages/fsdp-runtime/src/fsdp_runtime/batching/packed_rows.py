"""Rows of samples side by side; each sample attends only to itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, lcm

import torch
from torch import Tensor

from fsdp_runtime.batching.balance import Items
from fsdp_runtime.batching.micro_batches import MicroBatches, micro_batches_of
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


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One row of samples side by side, padded on the right.

    Example:
        >>> from fsdp_runtime.batching import pack
        >>> (row,) = pack([[5, 6, 7], [8, 9]], budget=6, multiple_of=2).rows()
        >>> row.cu_seqlens.tolist()
        [0, 3, 5, 6]
        >>> {sample: part.tolist() for sample, part in row.unpack(row.input_ids).items()}
        {0: [5, 6, 7], 1: [8, 9]}
    """

    samples: tuple[int, ...]  # the indices of the row's samples, in the order of their tokens
    lengths: tuple[int, ...]  # the tokens of each sample
    input_ids: Tensor  # ``[1, seq]`` int64
    position_ids: Tensor  # ``[1, seq]`` int64; restart at 0 with each sample, and with the padding
    # ``[1, seq]`` int64: the next token of the same sample, or ``ignore_index`` if no token follows or the next token
    # does not count in the loss
    targets: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs of a model's forward, by name."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids}

    @property
    def cu_seqlens(self) -> Tensor:
        """``[sequences + 1]`` int32: the start of each sample and of the padding, if any, and ``seq`` at the end."""
        starts = [0, *accumulate(self.lengths)]
        length = self.input_ids.shape[1]
        ends = [] if starts[-1] == length else [length]
        return torch.tensor([*starts, *ends], dtype=torch.int32, device=self.input_ids.device)

    def to(self, device: torch.device | str) -> PackedRow:
        """Return the row with its tensors on a device."""
        tensors = (tensor.to(device) for tensor in (self.input_ids, self.position_ids, self.targets))
        return PackedRow(self.samples, self.lengths, *tensors)

    def unpack(self, values: Tensor) -> dict[Hashable, Tensor]:
        """Return the values of each sample ``[length]``, as views.

        Args:
            values: ``[1, seq]`` or ``[seq]``, a value per token, such as log-probabilities of :attr:`targets`.

        Raises:
            SampleError: ``values`` does not have one value for each token of the row.
        """
        if tuple(values.shape) not in (tuple(self.input_ids.shape), tuple(self.input_ids.shape[1:])):
            raise SampleError(f"values {tuple(values.shape)} for a row of {tuple(self.input_ids.shape)} tokens")
        parts = torch.split(values.reshape(-1)[: sum(self.lengths)], list(self.lengths))
        return dict(zip(self.samples, parts, strict=True))


def pack(
    samples: Sequence[Tensor | Sequence[int]],
    budget: int,
    *,
    ranks: int = 1,
    loss_masks: Sequence[Tensor | Sequence[int]] | None = None,
    cp: int = 1,
    multiple_of: int = 1,
    distinct_lengths: int = 8,
    pair_cost: float = PAIR_COST,
    padding_id: int = 0,
    ignore_index: int = -100,
) -> MicroBatches[PackedRow]:
    """Pack samples into rows of at most ``budget`` tokens, with the same work for all ranks in each micro-batch.

    The work of a sample of ``n`` tokens is ``n + pair_cost * n * (n + 1) / 2``.  The number of micro-batches is the
    least number found to fit the samples, and is the same on all ranks.

    Args:
        samples: token ids, ``[length]`` integers each; the same on every rank.
        budget: the largest number of tokens that one rank holds in a micro-batch.
        ranks: the number of data-parallel ranks, ``submesh(mesh, "dp").size()``.
        loss_masks: for each sample ``[length]``, nonzero for tokens that count in the loss as targets; all by default.
        cp: the size of the context-parallel axis: rows have up to ``budget * cp`` tokens, and each rank gets its part
            by ``SequenceLayout.shard``.
        multiple_of: a divisor of all lengths of rows.
        distinct_lengths: the largest number of different lengths of rows; rows are padded to these lengths, and each
            length may cost a compilation.
        pair_cost: the work of attention between two tokens, in units of the other work of a token:
            ``1 / (6 * hidden_size)`` for an ordinary decoder.
        padding_id: the token id of padding.
        ignore_index: the target of tokens that are not scored.

    Raises:
        SampleError: ``samples`` is empty, a sample is longer than a row, or a loss mask has another length than its
            sample.
        OptionError: an option is out of range.

    Example:
        >>> from fsdp_runtime.batching import pack
        >>> packing = pack([[5, 6, 7], [8, 9], [10, 11, 12, 13]], budget=5, ranks=2)
        >>> packing.micro_batches
        1
        >>> row = packing.rows(rank=0)[0]
        >>> row.position_ids
        tensor([[0, 1, 2, 0, 1]])
        >>> row.targets
        tensor([[   6,    7, -100,    9, -100]])
    """
    sizes = row_sizes(budget, ranks, cp, multiple_of, distinct_lengths=distinct_lengths, pair_cost=pair_cost)
    read = read_samples(samples, loss_masks)
    lengths = [sample.length for sample in read]
    require_rows_long_enough(lengths, sizes.capacity, budget, cp)

    def make_row(items: Sequence[int]) -> PackedRow:
        chosen = [read[item] for item in items]
        tokens = sum(sample.length for sample in chosen)
        padding = sizes.padded(tokens) - tokens
        ids = torch.cat([*(sample.token_ids for sample in chosen), torch.full((padding,), padding_id)])
        positions = torch.cat([torch.arange(length) for length in (*(sample.length for sample in chosen), padding)])
        scored = torch.cat([*(sample.scored for sample in chosen), torch.zeros(padding, dtype=torch.bool)])
        targets = torch.where(scored, ids, ignore_index).roll(-1)  # the first token of a sample is not scored
        return PackedRow(
            tuple(items), tuple(sample.length for sample in chosen), ids[None], positions[None], targets[None]
        )

    work = [length + pair_cost * length * (length + 1) / 2 for length in lengths]
    return micro_batches_of(Items(lengths, work, sizes.capacity), ranks, make_row)


def read_samples(samples: Sequence[TokenIds], loss_masks: Sequence[TokenIds] | None, within: str = "") -> list[Sample]:
    """Check samples and their loss masks; ``within`` follows a sample's name in error messages."""
    if not len(samples):
        raise SampleError(f"no samples{within}: give one or more")
    if loss_masks is not None and len(loss_masks) != len(samples):
        raise SampleError(f"{len(samples)} samples{within} and {len(loss_masks)} loss masks: give one mask per sample")
    read = []
    for index, token_ids in enumerate(samples):
        name, ids = f"sample {index}{within}", torch.as_tensor(token_ids)
        if ids.ndim != 1 or not len(ids) or not is_integer(ids):
            raise SampleError(f"{name} is {tuple(ids.shape)} of {ids.dtype}: give [length] integers, at least one")
        mask = None if loss_masks is None else torch.as_tensor(loss_masks[index]).detach().cpu() != 0
        if mask is not None and mask.shape != ids.shape:
            raise SampleError(
                f"{name} has {len(ids)} tokens and a loss mask {tuple(mask.shape)}: give one entry per token"
            )
        read.append(Sample(ids.detach().to("cpu", torch.int64).contiguous(), len(ids), mask))
    return read


def require_rows_long_enough(lengths: Sequence[int], capacity: int, budget: int, cp: int, within: str = "") -> None:
    """Check that every sample fits into a row; the error names a sufficient budget and ``cp``."""
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if (length := lengths[longest]) > capacity:
        count = sum(tokens > capacity for tokens in lengths)
        raise SampleError(
            f"{count} of {len(lengths)} samples exceed a row of {capacity} tokens (budget={budget}, cp={cp}); the "
            f"longest is sample {longest}{within} with {length}: shorten them, or give budget={-(-length // cp)} or "
            f"cp={-(-length // budget)} or more"
        )
