"""Process groups between ranks of separate jobs, and exchanges in them, each within a timeout."""

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
from torch.distributed.distributed_c10d import Store

from fsdp_runtime._torch_compat import separate_group
from fsdp_runtime.errors import OptionError, WeightSyncError
from fsdp_runtime.sharded import own_rank

#: Maximum time of an exchange in a transfer.
DEFAULT_TIMEOUT = timedelta(minutes=5)
#: Tags separate messages of different kinds: after a failure some ranks are still in a round while others report it,
#: and gloo ends a process that receives more bytes than expected.  NCCL has no tags.
ROUND, SIZES, CHANGES, HANDSHAKE, WINDOWS = 1, 2, 3, 1000, 2000


def transfer_group(
    store: Store,
    rank: int,
    world_size: int,
    *,
    name: str = "transfer",
    backend: str = "gloo",
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> ProcessGroup:
    """Form a process group of ranks that belong to separate jobs, such as a trainer's and an engine's.

    The group is separate from a job's world: it numbers its own ranks, needs no ``init_process_group``, and leaves
    other groups unchanged.  After a rank has died, the other ranks form a new group under another name with the
    replacement, and the trainer goes on.  Leave it with ``torch.distributed.destroy_process_group(group)``.
    :func:`execute_transfer`, :class:`WeightSync` and :func:`verify_transfer` take it.

    Args:
        store: the meeting point of the ranks, such as a ``torch.distributed.TCPStore`` that the trainer's first rank
            opens.
        rank: this process's rank in the group, as in the plan.
        world_size: processes of the group.
        name: the same on every rank, and unique among the groups of a store.
        backend: ``"gloo"``, ``"nccl"`` or another backend of torch.
        timeout: maximum wait for the other ranks, and torch's timeout of the group's operations.

    Raises:
        OptionError: the rank is not below ``world_size``, torch has no such backend, or the name is in use.
        WeightSyncError: not all ranks joined in time.

    Example:
        >>> import torch.distributed as dist
        >>> from fsdp_runtime.sync import transfer_group
        >>> group = transfer_group(dist.HashStore(), 0, 1)
        >>> group.rank(), group.size()
        (0, 1)
        >>> dist.destroy_process_group(group)
    """
    if not 0 <= rank < world_size:
        raise OptionError(f"rank={rank}, world_size={world_size}: give a rank from 0 to world_size - 1")
    unknown = {part.rpartition(":")[2] for part in backend.lower().split(",")} - set(dist.Backend.backend_list)
    if unknown:
        raise OptionError(f"backend={backend!r}: give one of {', '.join(dist.Backend.backend_list)}")
    start = time.monotonic()
    try:
        return separate_group(store, rank, world_size, name, backend, timeout)
    except ValueError as error:
        raise OptionError(f"name={name!r}: this process has a group of that name; give each group another") from error
    except RuntimeError as error:
        raise WeightSyncError(
            f"rank {rank} of {world_size} could not join the group {name!r}, after {time.monotonic() - start:.1f} of "
            f"{timeout.total_seconds():g} s: start every rank, with the same store and name "
            f"({str(error).partition(chr(10))[0]})"
        ) from error


def rank_in(group: ProcessGroup | None) -> int:
    """Return this process's rank in a group; for ``None``, the rank in the world, or 0 without a world."""
    # ``torch.distributed.get_rank`` maps a group's ranks to ranks of the world, and a separate group has no such ranks.
    return own_rank() if group is None else group.rank()


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
                self.gather([0])
            raise
        if not all(succeeded for (succeeded,) in self.gather([1]).values()):
            raise WeightSyncError(
                "an update was not applied on any rank, since one could not take or did not receive all of it; the "
                "message of that rank says why. The next update is full"
            )
