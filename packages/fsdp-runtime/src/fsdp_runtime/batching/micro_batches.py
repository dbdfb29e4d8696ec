"""Rows as the micro-batches of data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from fsdp_runtime.batching.balance import Items, assign_rows, lower_bound, step_work
from fsdp_runtime.errors import OptionError, SampleError

RowT = TypeVar("RowT", bound=Any)  # a row with ``unpack``, which returns its values by sample


@dataclass(frozen=True, eq=False)
class MicroBatches(Generic[RowT]):
    """The rows of every rank and micro-batch; the result of :func:`pack` and :func:`pack_tree`.

    The same samples give the same packing on every rank, so that no communication is needed.
    """

    items: Items = field(repr=False)  # the assigned items: tokens and work of each item, and the capacity of a row
    # for each micro-batch, the items of one row for each rank
    assignment: Sequence[Sequence[Sequence[int]]] = field(repr=False)
    make_row: Callable[[Sequence[int]], RowT] = field(repr=False)  # builds a row from its items

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks."""
        return len(self.assignment[0])

    @property
    def micro_batches(self) -> int:
        """The number of rows per rank, equal on all ranks, since every micro-batch has collectives."""
        return len(self.assignment)

    @property
    def work(self) -> float:
        """The work of a step: the sum over the micro-batches of the largest row's work."""
        return step_work(self.items, [[list(row) for row in rows] for rows in self.assignment])

    @property
    def imbalance(self) -> float:
        """The share by which :attr:`work` exceeds the lower bound, 0 at best."""
        return self.work / lower_bound(self.items, self.ranks) - 1

    def rows(self, rank: int = 0) -> list[RowT]:
        """Return the rows of a rank, one for each micro-batch.

        Args:
            rank: the index on the data-parallel axis, ``submesh(mesh, "dp").get_local_rank()``.

        Raises:
            OptionError: the rank does not exist.
        """
        if not 0 <= rank < self.ranks:
            raise OptionError(f"rank={rank} of {self.ranks} ranks: samples were packed for ranks={self.ranks}")
        return [self.make_row(rows[rank]) for rows in self.assignment]

    def unpack(self, values: Sequence[Tensor], rank: int = 0) -> dict[Hashable, Tensor]:
        """Return the values of each sample of a rank, such as log-probabilities; the inverse of packing.

        Args:
            values: for each micro-batch of the rank, the argument of the row's ``unpack``.
            rank: the index on the data-parallel axis.

        Returns:
            For each sample of the rank ``[length]``: entry ``t`` is about token ``t + 1``, and the last is 0, as in
            ``rl_logprobs.token_logprobs(..., shift=True)`` for this sample only.

        Raises:
            OptionError: the rank does not exist.
            SampleError: the numbers of values and rows differ, or a value has another shape than its row.
        """
        rows = self.rows(rank)
        if len(values) != len(rows):
            raise SampleError(f"{len(values)} tensors for {len(rows)} rows: give one tensor per micro-batch")
        return {key: part for row, of_row in zip(rows, values, strict=True) for key, part in row.unpack(of_row).items()}


def micro_batches_of(items: Items, ranks: int, make_row: Callable[[Sequence[int]], RowT]) -> MicroBatches[RowT]:
    """Assign items to rows; items keep their order within a row."""
    assigned = assign_rows(items, ranks)
    return MicroBatches(items, tuple(tuple(tuple(sorted(row)) for row in rows) for rows in assigned), make_row)
