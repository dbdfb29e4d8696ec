"""Execute a transfer plan over a process group, a bucket at a time: pack, exchange, unpack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.sync.groups import DEFAULT_TIMEOUT, rank_in
from fsdp_runtime.sync.model_layout import ModelShards, present_tensors
from fsdp_runtime.sync.point_to_point import ROUND, SHARED_BUCKETS, TAKEN, WINDOWS, Handshake, PointToPoint
from fsdp_runtime.sync.schedule import (
    Message,
    Round,
    aligned,
    fits_in_one_round,
    rounds_of,
    split_transfers,
    windows_of,
)
from fsdp_runtime.sync.shared_buckets import SharedBuckets
from fsdp_runtime.sync.tensor_views import Sides, message_values
from fsdp_runtime.weights import DEFAULT_BUCKET_BYTES
from tp_plans.transfer import TransferPlan


@torch.no_grad()
def execute_transfer(
    plan: TransferPlan,
    *,
    source: Mapping[str, Tensor] | ModelShards | None = None,
    destination: Mapping[str, Tensor] | None = None,
    group: ProcessGroup | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    timeout: timedelta = DEFAULT_TIMEOUT,
    device: torch.device | str | None = None,
    shared_memory: bool = False,
    on_round: Callable[[int, int], object] | None = None,
) -> None:
    """Send blocks of weights from source to destination ranks by a plan, shard to shard.

    Collective over the plan's ranks; other ranks need not call it.  Each round sends and receives point to point
    (``batch_isend_irecv``, with gloo and NCCL), from and into one buffer of at most ``bucket_bytes``.  Values are
    converted to the plan's dtypes at packing, and to the destination's dtypes at unpacking.

    Args:
        plan: the same on every rank; its ranks are ranks of ``group``.
        source: this rank's local tensors, if it sends, or their :class:`ModelShards`.
        destination: this rank's local tensors to fill, if it receives.
        group: the process group; ``None`` for the world.
        bucket_bytes: maximum bytes that this rank holds besides its tensors.
        timeout: maximum time of a round.  With NCCL the group's own timeout applies.
        device: device of the buffer; ``None`` for the device of the first local tensor.  Shards that are offloaded to
            the host need the group's device here.
        shared_memory: ranks of one host exchange messages in shared memory, in one bucket per rank; the group then
            carries eight bytes per message and eight per receipt.  Set it on every rank, or on none.
        on_round: called after each of this rank's rounds with the numbers of completed rounds and of all rounds.

    Raises:
        OptionError: a bucket is smaller than an element, or the machine has no ``/dev/shm`` for ``shared_memory``.
        OSError: ``/dev/shm`` is too small.
        WeightSyncError: a local tensor is missing or too small (before anything is sent), or another rank did not
            take part in a round within ``timeout``; the destination then holds parts of old and of new weights.

    Example:
        >>> import torch, tp_plans
        >>> from fsdp_runtime.sync import ModelShards, execute_transfer
        >>> trained, engine = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
        >>> shards, target = ModelShards(trained), ModelShards(engine)
        >>> plan = tp_plans.transfer.plan_transfer(shards.layout, target.layout)
        >>> execute_transfer(plan, source=shards.local, destination=target.local)
        >>> torch.equal(trained.weight, engine.weight)
        True
    """
    rank = rank_in(group)
    sides = Sides(plan, rank, present_tensors(source), destination or {})
    sides.require_tensors()
    where = torch.device(device) if device is not None else sides.device
    peers = PointToPoint(rank, group, timeout)
    transfers = split_transfers(plan, sides.transfers, bucket_bytes)
    for transfer in transfers:
        if transfer.is_local:
            sides.copy(transfer)
    windows = 1  # enough if all messages fit in one round, which needs no communication; else the ranks agree
    if not fits_in_one_round(plan, bucket_bytes):
        handshake = Handshake(plan.ranks or (rank,), peers, where, WINDOWS)
        windows = max(number for (number,) in handshake.gather([windows_of(plan, transfers, bucket_bytes)]).values())
    is_shared = shared_memory and any(plan.bytes_received(receiver) for receiver in plan.ranks)
    run_rounds(sides, rounds_of(plan, transfers, windows), peers, where, shared_memory=is_shared, on_round=on_round)


def run_rounds(
    sides: Sides,
    rounds: Sequence[Round],
    peers: PointToPoint,
    device: torch.device,
    *,
    shared_memory: bool,
    on_round: Callable[[int, int], object] | None = None,
) -> None:
    """Run this rank's rounds of a plan; collective over the plan's ranks if memory is shared."""
    with ExitStack() as stack:
        shared = None
        if shared_memory:
            handshake = Handshake(sides.plan.ranks or (sides.rank,), peers, device, SHARED_BUCKETS)
            shared = SharedBuckets(rounds, sides.rank, handshake)
            stack.callback(shared.close)
        rank_rounds = RankRounds(rounds, sides, peers, device, shared)
        for number, messages in enumerate(rounds):
            rank_rounds.run(messages)
            if on_round is not None:
                on_round(number + 1, len(rounds))


class RankRounds:
    """This rank's exchanges, and a buffer for its largest round; ``shared`` carries messages on this host."""

    def __init__(
        self,
        rounds: Sequence[Round],
        sides: Sides,
        peers: PointToPoint,
        device: torch.device,
        shared: SharedBuckets | None,
    ) -> None:
        self._sides, self._peers, self._shared, self._device = sides, peers, shared, device
        sizes = (sum(aligned(message.nbytes) for message in self._over_group(messages)) for messages in rounds)
        self._buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)

    def run(self, messages: Round) -> None:
        """Run a round; raise if a rank does not send or receive its message in time."""
        rank, shared = self._sides.rank, self._shared
        sent = [message for message in messages if message.source == rank]
        received = [message for message in messages if message.destination == rank]
        carried: dict[int, Tensor] = {}  # tensors that the group carries, by message
        runs: dict[int, Tensor] = {}  # the bytes of messages
        offset = 0
        for message in self._over_group(messages):
            runs[id(message)] = carried[id(message)] = self._buffer[offset : offset + message.nbytes]
            offset += aligned(message.nbytes)
        local = [message for message in messages if id(message) not in runs]
        places = {} if shared is None else shared.places(messages)
        for message in local:
            place = places.get(message.destination, 0) if message.source == rank else 0
            carried[id(message)] = self._number(place)
            if shared is not None and message.source == rank:
                runs[id(message)] = shared.run(message, place)
        for message in sent:
            for transfer, values in message_values(self._sides.plan, message, runs[id(message)]):
                self._sides.read(transfer, values)
        outgoing = {message.destination: carried[id(message)] for message in sent}
        incoming = {message.source: carried[id(message)] for message in received}
        self._peers.exchange(outgoing, incoming, ROUND)
        for message in received:
            if shared is not None and id(message) not in runs:
                runs[id(message)] = shared.run(message, int(carried[id(message)]))
            for transfer, values in message_values(self._sides.plan, message, runs[id(message)]):
                self._sides.write(transfer, values)
        # A bucket is reused only after its messages have been read.
        taken = {message.source: self._number(0) for message in local if message.destination == rank}
        freed = {message.destination: self._number(0) for message in local if message.source == rank}
        self._peers.exchange(taken, freed, TAKEN)

    def _number(self, value: int) -> Tensor:
        return torch.tensor([value], device=self._device)

    def _over_group(self, messages: Round) -> list[Message]:
        shared = self._shared
        return [message for message in messages if shared is None or not shared.shares(message)]
