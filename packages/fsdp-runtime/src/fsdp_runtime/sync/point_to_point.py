"""Exchanges with other ranks within a timeout: tensors, and numbers for an agreement of all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import WeightSyncError

#: Tags separate messages of different kinds: after a failure some ranks are still in a round while others report it,
#: and gloo ends a process that receives more bytes than expected.  NCCL has no tags.
ROUND, SIZES, CHANGES, HANDSHAKE, WINDOWS = 1, 2, 3, 1000, 2000


@dataclass(frozen=True)
class PointToPoint:
    """Exchanges of this rank with other ranks of a process group, each within a timeout."""

    rank: int
    group: ProcessGroup | None
    timeout: timedelta

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> None:
        """Send the outgoing tensors and fill the incoming tensors, by rank of the group, all at once."""
        lost = self.unfinished(outgoing, incoming, tag)
        for peer, error in lost.items():
            raise WeightSyncError(
                f"rank {self.rank} could not complete a transfer of weights with rank {peer} within "
                f"{self.timeout.total_seconds():g} s (open: ranks {', '.join(map(str, sorted(lost)))}): that rank "
                "died, stalls, or did not call execute_transfer. Form a new process group and transfer in full"
            ) from error

    def unfinished(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int
    ) -> dict[int, RuntimeError]:
        """Run :meth:`exchange`, but return the ranks that did not send or receive in time instead of raising."""
        runs = [(dist.isend, *item) for item in outgoing.items()] + [(dist.irecv, *item) for item in incoming.items()]
        parts = [dist.P2POp(method, run, group=self.group, group_peer=peer, tag=tag) for method, peer, run in runs]
        peers = [*outgoing, *incoming]
        if not peers:
            return {}
        deadline = time.monotonic() + self.timeout.total_seconds()
        try:
            works = dist.batch_isend_irecv(parts)
        except RuntimeError as error:  # gloo detects a closed connection here
            return dict.fromkeys(peers, error)
        lost: dict[int, RuntimeError] = {}
        for peer, work in zip(peers, works, strict=False):  # NCCL returns one work for all
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                work.wait(left)
            except RuntimeError as error:
                lost.setdefault(peer, error)
        return lost


class Handshake:
    """Exchanges between the ranks of a plan, through the first rank; ``tag`` is the kind of the messages."""

    # The other ranks wait for the first rank's answer twice as long as the first rank waits for their numbers.

    def __init__(self, ranks: Sequence[int], peers: PointToPoint, device: torch.device, tag: int = HANDSHAKE) -> None:
        self._first, self._others = ranks[0], list(ranks[1:])
        self._peers, self._device, self._tag = peers, device, tag

    def gather(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """All-gather numbers: return every rank's numbers on every rank.  All ranks give equally many."""
        # The first rank's error names a rank that took no part in time. The errors of other ranks refer to the first
        # rank's error, as gloo closes all connections at a timeout.
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
                    "WeightSync again"
                ) from error
        return dict(zip(ranks, table.tolist(), strict=True))

    def _collected(self, own: Tensor, tag: int) -> Tensor:
        """Collect the numbers of every rank on the first rank, and send the table to all others."""
        incoming = {rank: torch.zeros_like(own) for rank in self._others}
        missing = self._peers.unfinished({}, incoming, tag)
        if missing:
            raise WeightSyncError(
                f"ranks {', '.join(map(str, sorted(missing)))} did not take part in an update of weights within "
                f"{self._peers.timeout.total_seconds():g} s: they died, stall, or did not call update. Form a new "
                "process group and build WeightSync again"
            )
        table = torch.stack([own, *incoming.values()])
        self._peers.exchange(dict.fromkeys(self._others, table), {}, tag)
        return table

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Run a step on every rank; an exception on one rank raises on all ranks."""
        try:
            yield
        except Exception:
            with suppress(WeightSyncError):
                self._agree(succeeded=False)
            raise
        self._agree(succeeded=True)

    def _agree(self, *, succeeded: bool) -> None:
        if not all(row[0] for row in self.gather([int(succeeded)]).values()):
            raise WeightSyncError(
                "an update was not applied on any rank, since one could not take or did not receive all of it; the "
                "message of that rank says why. The next update is full"
            )
