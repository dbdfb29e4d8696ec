"""Send tensors to some ranks and receive from some, all at once, within a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import WeightSyncError

#: Tags keep messages of different kinds apart: after a failure some ranks are still in a round while others report it,
#: and gloo ends a process that receives more bytes than it waits for.  NCCL has no tags.
ROUND, TAKEN, SIZES, CHANGES, HANDSHAKE, SHARED_BUCKETS = 1, 2, 3, 4, 1000, 2000


def exchange(
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Tensor],
    rank: int,
    group: ProcessGroup | None,
    timeout: timedelta,
    tag: int,
) -> None:
    """Send one tensor to each of some ranks and fill one from each of some, all at once.

    Args:
        outgoing: what to send, by rank of the group.
        incoming: what to fill, by rank of the group.
        rank: this rank.
        group: the process group.
        timeout: for all of them together.
        tag: the kind of the messages.
    """
    lost = unfinished_exchange(outgoing, incoming, rank, group, timeout, tag)
    for peer, error in lost.items():
        raise WeightSyncError(
            f"rank {rank} could not complete a transfer of weights with rank {peer} within "
            f"{timeout.total_seconds():g} s (open: ranks {', '.join(map(str, sorted(lost)))}): that rank died, "
            "stalls, or did not call execute_transfer. Form a new process group and transfer in full"
        ) from error


def unfinished_exchange(
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Tensor],
    rank: int,
    group: ProcessGroup | None,
    timeout: timedelta,
    tag: int,
) -> dict[int, RuntimeError]:
    """Do as :func:`exchange`, and return the ranks that did not send or take their tensor in time."""
    sends = [dist.P2POp(dist.isend, run, group=group, group_peer=peer, tag=tag) for peer, run in outgoing.items()]
    receives = [dist.P2POp(dist.irecv, run, group=group, group_peer=peer, tag=tag) for peer, run in incoming.items()]
    peers = [*outgoing, *incoming]
    if not peers:
        return {}
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        works = dist.batch_isend_irecv([*sends, *receives])
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
