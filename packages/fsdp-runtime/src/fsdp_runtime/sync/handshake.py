"""Small exchanges of numbers before and after an update, bounded in time, with one message on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sync.point_to_point import HANDSHAKE, PointToPoint


class Handshake:
    """Exchanges of the ranks of a plan, through the first of them; ``tag`` is the kind of the messages.

    The others wait twice as long for the first rank's answer as it waits for them.
    """

    def __init__(self, ranks: Sequence[int], peers: PointToPoint, device: torch.device, tag: int = HANDSHAKE) -> None:
        self._first, self._others = ranks[0], list(ranks[1:])
        self._peers, self._device, self._tag = peers, device, tag

    def gather(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Return the numbers of every rank, as many as this one's, on every rank.

        The first rank's error names a rank that took no part in time.  With gloo, whose connections all close at a
        timeout, those of other ranks refer to it.
        """
        own, tag = torch.tensor(numbers, device=self._device), self._tag + len(numbers)
        ranks = [self._first, *self._others]
        if self._peers.rank == self._first:
            table = self._collected(own, tag)
        else:
            table = own.new_zeros(len(ranks), len(own))
            try:
                self._peers.exchange({self._first: own}, {}, tag)
                replace(self._peers, timeout=2 * self._peers.timeout).exchange({}, {self._first: table}, tag)
            except WeightSyncError as error:
                raise WeightSyncError(
                    f"rank {self._peers.rank} had no answer from rank {self._first}, which asks all ranks about an "
                    f"update, within {3 * self._peers.timeout.total_seconds():g} s: that rank or another died, stalls, "
                    "or did not call update; the message of that rank says which. Form a new process group and build "
                    "WeightSync anew"
                ) from error
        return dict(zip(ranks, table.tolist(), strict=True))

    def _collected(self, own: Tensor, tag: int) -> Tensor:
        """The numbers of every rank, on the first rank, sent to all others."""
        incoming = {rank: torch.zeros_like(own) for rank in self._others}
        missing = self._peers.unfinished({}, incoming, tag)
        if missing:
            raise WeightSyncError(
                f"ranks {', '.join(map(str, sorted(missing)))} did not take part in an update of weights within "
                f"{self._peers.timeout.total_seconds():g} s: they died, stall, or did not call update. Form a new "
                "process group and build WeightSync anew"
            )
        table = torch.stack([own, *incoming.values()])
        self._peers.exchange(dict.fromkeys(self._others, table), {}, tag)
        return table

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Run a step on every rank, and raise on all if it raised on one."""
        try:
            yield
        except Exception:
            with suppress(WeightSyncError):
                self._agree(succeeded=False)
            raise
        self._agree(succeeded=True)

    def _agree(self, *, succeeded: bool) -> None:
        """Return if a step succeeded on every rank."""
        if not all(row[0] for row in self.gather([int(succeeded)]).values()):
            raise WeightSyncError(
                "an update was not applied on any rank, since one could not take or did not receive all of it; the "
                "message of that rank says why. The next update is full"
            )
