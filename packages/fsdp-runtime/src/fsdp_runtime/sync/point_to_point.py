"""Send tensors to some ranks and receive from some, all at once, within a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import WeightSyncError

#: Tags keep messages of different kinds apart: after a failure some ranks are still in a round while others report it,
#: and gloo ends a process that receives more bytes than it waits for.  NCCL has no tags.
ROUND, TAKEN, SIZES, CHANGES, HANDSHAKE, SHARED_BUCKETS, WINDOWS = 1, 2, 3, 4, 1000, 2000, 2500


@dataclass(frozen=True)
class PointToPoint:
    """Exchanges of one rank with others of a process group, each within a time."""

    rank: int
    group: ProcessGroup | None
    timeout: timedelta

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> None:
        """Send one tensor to each of some ranks of the group and fill one from each of some, all at once."""
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
        """Do as :meth:`exchange`, and return the ranks that did not send or take their tensor in time."""
        ways = [(dist.isend, *each) for each in outgoing.items()] + [(dist.irecv, *each) for each in incoming.items()]
        parts = [dist.P2POp(way, run, group=self.group, group_peer=peer, tag=tag) for way, peer, run in ways]
        peers = [*outgoing, *incoming]
        if not peers:
            return {}
        deadline = time.monotonic() + self.timeout.total_seconds()
        try:
            works = dist.batch_isend_irecv(parts)
        except RuntimeError as error:  # gloo notices here that the other end of a connection is gone
            return dict.fromkeys(peers, error)
        lost: dict[int, RuntimeError] = {}
        for peer, work in zip(peers, works, strict=False):  # NCCL returns one work for all
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                work.wait(left)
            except RuntimeError as error:
                lost.setdefault(peer, error)
        return lost
