"""Small exchanges of numbers before and after an update, bounded in time, with one message on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.transfer.execute import exchange, unfinished_exchange


class Handshake:
    """Exchanges of the ranks of a plan, through the first of them.

    The first rank waits as long as ``timeout`` for the others, and tells those that came who did not; they wait twice
    as long for its answer.

    Args:
        ranks: the plan's ranks, in order.
        rank: this rank.
        group: the process group.
        device: where its backend takes tensors from.
        timeout: for each exchange.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, group: ProcessGroup | None, device: torch.device, timeout: timedelta
    ) -> None:
        self._first, self._others = ranks[0], list(ranks[1:])
        self._rank, self._group, self._device, self._timeout = rank, group, device, timeout

    def gather(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Return the numbers of every rank, on every rank.

        Args:
            numbers: this rank's, as many as the others'.

        Raises:
            WeightSyncError: a rank did not take part in time; the message names it on every rank that did.
        """
        own = torch.tensor([1, *numbers], device=self._device)
        table = own.new_zeros(1 + len(self._others), len(own))
        if self._rank == self._first:
            incoming = {rank: torch.zeros_like(own) for rank in self._others}
            missing = unfinished_exchange({}, incoming, self._rank, self._group, self._timeout)
            present = [rank for rank in self._others if rank not in missing]
            table[0] = own
            for place, rank in enumerate(self._others, start=1):
                if rank not in missing:  # a late rank may still write what it was given
                    table[place] = incoming[rank]
            exchange(dict.fromkeys(present, table), {}, self._rank, self._group, self._timeout)
        else:
            exchange({self._first: own}, {}, self._rank, self._group, self._timeout)
            exchange({}, {self._first: table}, self._rank, self._group, 2 * self._timeout)
        rows: list[list[int]] = table.tolist()
        ranks = [self._first, *self._others]
        absent = [rank for rank, row in zip(ranks, rows, strict=True) if not row[0]]
        if absent:
            raise WeightSyncError(
                f"ranks {', '.join(map(str, absent))} did not take part in an update of weights within "
                f"{self._timeout.total_seconds():g} s: they died, stall, or did not call update. Nothing has changed. "
                "Form a new process group and build WeightSync anew"
            )
        return {rank: row[1:] for rank, row in zip(ranks, rows, strict=True)}

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Run a step on every rank, and raise on all if it raised on one.

        Raises:
            WeightSyncError: the step failed on another rank, or a rank did not answer in time.
        """
        try:
            yield
        except Exception:
            with suppress(WeightSyncError):
                self._agree(succeeded=False)
            raise
        self._agree(succeeded=True)

    def _agree(self, *, succeeded: bool) -> None:
        """Return if a step succeeded on every rank.

        Raises:
            WeightSyncError: a rank failed, or did not answer in time.
        """
        if not all(row[0] for row in self.gather([int(succeeded)]).values()):
            raise WeightSyncError(
                "an update was not applied on any rank, since one could not take or did not receive all of it; the "
                "message of that rank says why. The next update is full"
            )
