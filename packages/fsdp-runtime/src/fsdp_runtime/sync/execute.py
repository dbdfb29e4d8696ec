"""Execute a transfer plan over a process group, a bucket at a time: pack, exchange, unpack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.sync.groups import DEFAULT_TIMEOUT, rank_in
from fsdp_runtime.sync.model_layout import ModelShards, present_tensors
from fsdp_runtime.sync.point_to_point import ROUND, WINDOWS, Handshake, PointToPoint
from fsdp_runtime.sync.schedule import (
    Message,
    Round,
    aligned,
    fits_in_one_round,
    rounds_of,
    split_transfers,
    windows_of,
)
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

    Raises:
        OptionError: a bucket is smaller than an element.
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
    run_rounds(sides, rounds_of(plan, transfers, windows), peers, where)


def run_rounds(sides: Sides, rounds: Sequence[Round], peers: PointToPoint, device: torch.device) -> None:
    """Run this rank's rounds of a plan."""
    rank_rounds = RankRounds(rounds, sides, peers, device)
    for messages in rounds:
        rank_rounds.run(messages)


class RankRounds:
    """This rank's exchanges, and a buffer for its largest round."""

    def __init__(self, rounds: Sequence[Round], sides: Sides, peers: PointToPoint, device: torch.device) -> None:
        self._sides, self._peers = sides, peers
        sizes = (sum(aligned(message.nbytes) for message in messages) for messages in rounds)
        self._buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)

    def run(self, messages: Round) -> None:
        """Run a round; raise if a rank does not send or receive its message in time."""
        outgoing: dict[int, Tensor] = {}
        incoming: dict[int, Tensor] = {}
        received: list[tuple[Message, Tensor]] = []
        offset = 0
        for message in messages:
            run = self._buffer[offset : offset + message.nbytes]
            offset += aligned(message.nbytes)
            if message.source == self._sides.rank:
                outgoing[message.destination] = run
                for transfer, values in message_values(self._sides.plan, message, run):
                    self._sides.read(transfer, values)
            else:
                incoming[message.source] = run
                received.append((message, run))
        self._peers.exchange(outgoing, incoming, ROUND)
        for message, run in received:
            for transfer, values in message_values(self._sides.plan, message, run):
                self._sides.write(transfer, values)
