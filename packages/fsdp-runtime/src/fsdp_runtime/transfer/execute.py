"""Execute a transfer plan over a process group, a bucket at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.argument_types import checked
from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.transfer.groups import DEFAULT_TIMEOUT, rank_in
from fsdp_runtime.transfer.model_layout import ModelShards, present_tensors
from fsdp_runtime.transfer.schedule import Message, Round, aligned, schedule_rounds, split_transfers
from fsdp_runtime.transfer.views import box_views, inside, torch_dtype
from fsdp_runtime.weights.stream import DEFAULT_BUCKET_BYTES
from tp_plans import BlockTransfer, TransferPlan
from tp_plans.transfer.boxes import box_shape


@torch.no_grad()
@checked
def execute_transfer(
    plan: TransferPlan,
    *,
    source: Mapping[str, Tensor] | ModelShards | None = None,
    destination: Mapping[str, Tensor] | None = None,
    group: ProcessGroup | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    timeout: timedelta = DEFAULT_TIMEOUT,
    device: torch.device | str | None = None,
    on_round: Callable[[int, int], object] | None = None,
) -> None:
    """Send blocks of weights from their ranks to where a plan says, shard to shard.

    Collective over the ranks of the plan; others need not call.  Each round sends and receives point to point
    (``batch_isend_irecv``, with gloo and NCCL), from and into one buffer of at most ``bucket_bytes``.  Values are
    converted to the plan's dtypes as they are packed and to the destination's as they are unpacked.

    Args:
        plan: the same on every rank; its ranks are those of ``group``.
        source: this rank's local tensors, if it sends, or the :class:`ModelShards` that has them.
        destination: this rank's local tensors to fill, if it receives.
        group: the process group; ``None`` for the world.
        bucket_bytes: the most bytes that this rank holds besides its tensors.
        timeout: how long a round may take.  With NCCL the group's own timeout applies.
        device: where the buffer is; ``None`` for the device of the first local tensor.  Shards that are offloaded to
            the host need the group's device here.
        on_round: called after each round with the number of rounds that are complete and of all rounds.

    Raises:
        OptionError: a bucket is smaller than an element.
        WeightSyncError: a local tensor is missing or too small (before anything is sent), or another rank did not
            take part in a round within ``timeout``; the destination then holds parts of old and of new weights.

    Example:
        >>> import torch, tp_plans
        >>> from fsdp_runtime import ModelShards, execute_transfer
        >>> trained, engine = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
        >>> shards, target = ModelShards(trained), ModelShards(engine)
        >>> plan = tp_plans.plan_transfer(shards.layout, target.layout)
        >>> execute_transfer(plan, source=shards.local, destination=target.local)
        >>> torch.equal(trained.weight, engine.weight)
        True
    """
    rank = rank_in(group)
    sides = Sides(plan, rank, present_tensors(source), destination or {})
    sides.require_tensors()
    for each in split_transfers(plan, bucket_bytes):
        if each.is_local and each.source == rank:
            sides.copy(each)
    rounds = schedule_rounds(plan, bucket_bytes)
    where = torch.device(device) if device is not None else sides.device
    buffer = torch.empty(_most_bytes(rounds, rank), dtype=torch.uint8, device=where)
    for number, messages in enumerate(rounds):
        _run_round(
            sides, [each for each in messages if rank in (each.source, each.destination)], buffer, group, timeout
        )
        if on_round is not None:
            on_round(number + 1, len(rounds))


class Sides:
    """This rank's local tensors on both sides of a plan."""

    def __init__(
        self, plan: TransferPlan, rank: int, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]
    ) -> None:
        self.plan, self.rank = plan, rank
        self.source, self.destination = source, destination

    @property
    def device(self) -> torch.device:
        """The device of the first local tensor."""
        tensors = (*self.source.values(), *self.destination.values())
        return tensors[0].device if tensors else torch.device("cpu")

    def require_tensors(self) -> None:
        """Look every local tensor up, so that what is missing is known before anything is sent."""
        for each in self.plan.transfers:
            if each.source == self.rank and not each.is_relay:
                list(box_views(self.plan.source, self.rank, self.source, each.tensor, each.box))
            if each.destination == self.rank or (each.is_relay and each.source == self.rank):
                sent = torch_dtype(self.plan.destination, each.tensor)
                for _, view in box_views(self.plan.destination, self.rank, self.destination, each.tensor, each.box):
                    _require_dtype(each.tensor, view.dtype, sent, self.rank)
                    if each.is_relay and each.source == self.rank:
                        _require_exact(each.tensor, view.dtype, sent, self.rank)

    def copy(self, each: BlockTransfer) -> None:
        """Copy a box that stays on this rank, in the dtype in which it would be sent."""
        values = torch.empty(
            box_shape(each.box), dtype=torch_dtype(self.plan.destination, each.tensor), device=self.device
        )
        self.read(each, values)
        self.write(each, values)

    def read(self, each: BlockTransfer, values: Tensor) -> None:
        """Fill a tensor of a box's shape from the source, or from what this rank has received and passes on."""
        if each.is_relay:
            self.read_back(each, values)
            return
        for part, view in box_views(self.plan.source, self.rank, self.source, each.tensor, each.box):
            values[inside(each.box, part)].copy_(view)

    def read_back(self, each: BlockTransfer, values: Tensor) -> None:
        """Fill a tensor of a box's shape with what the destination holds."""
        for part, view in box_views(self.plan.destination, self.rank, self.destination, each.tensor, each.box):
            values[inside(each.box, part)].copy_(view)

    def write(self, each: BlockTransfer, values: Tensor) -> None:
        """Store a tensor of a box's shape at the destination, wherever the rank stores a part of it."""
        for part, view in box_views(self.plan.destination, self.rank, self.destination, each.tensor, each.box):
            view.copy_(values[inside(each.box, part)])


def _require_dtype(tensor: str, stored: torch.dtype, sent: torch.dtype, rank: int) -> None:
    """Refuse a destination whose dtype would change the meaning of what is sent, as of elements without their scale."""
    wide = all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (stored, sent))
    if stored != sent and not wide:
        raise WeightSyncError(
            f"rank {rank} stores {tensor} in {stored} and is sent {sent}, which cannot be converted: give a tensor of "
            "the dtype that is sent, or send another (dtype=, quantize=)"
        )


def _require_exact(tensor: str, stored: torch.dtype, sent: torch.dtype, rank: int) -> None:
    """Refuse a rank that would pass on fewer bits than it is sent."""
    if torch.promote_types(stored, sent) != stored:
        raise WeightSyncError(
            f"rank {rank} stores {tensor} in {stored} and passes it on in {sent}, with fewer bits than it was sent: "
            "send the dtype that the engines store (dtype=), or plan without relay"
        )


def message_values(plan: TransferPlan, message: Message, run: Tensor) -> Iterator[tuple[BlockTransfer, Tensor]]:
    """Yield the transfers of a message, each with its values in the message's bytes, in the shape of its box."""
    offset = 0
    for each in message.transfers:
        part = run[offset : offset + each.nbytes]
        yield each, part.view(torch_dtype(plan.destination, each.tensor)).view(box_shape(each.box))
        offset += each.nbytes


def _of_rank(messages: Round, rank: int) -> list[Message]:
    return [each for each in messages if rank in (each.source, each.destination)]


def _most_bytes(rounds: list[Round], rank: int) -> int:
    return max((sum(aligned(each.nbytes) for each in _of_rank(messages, rank)) for messages in rounds), default=0)


def _run_round(
    sides: Sides, messages: list[Message], buffer: Tensor, group: ProcessGroup | None, timeout: timedelta
) -> None:
    runs, offset = [], 0
    for message in messages:
        runs.append(buffer[offset : offset + message.nbytes])
        offset += aligned(message.nbytes)
    outgoing, incoming = {}, {}
    for message, run in zip(messages, runs, strict=True):
        if message.source == sides.rank:
            for each, values in message_values(sides.plan, message, run):
                sides.read(each, values)
            outgoing[message.destination] = run
        else:
            incoming[message.source] = run
    exchange(outgoing, incoming, sides.rank, group, timeout)
    for message, run in zip(messages, runs, strict=True):
        if message.destination == sides.rank:
            for each, values in message_values(sides.plan, message, run):
                sides.write(each, values)


def exchange(
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Tensor],
    rank: int,
    group: ProcessGroup | None,
    timeout: timedelta,
) -> None:
    """Send one tensor to each of some ranks and fill one from each of some, all at once.

    Args:
        outgoing: what to send, by rank of the group.
        incoming: what to fill, by rank of the group.
        rank: this rank.
        group: the process group.
        timeout: for all of them together.

    Raises:
        WeightSyncError: a rank did not send or take its tensor in time.
    """
    lost = unfinished_exchange(outgoing, incoming, rank, group, timeout)
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
) -> dict[int, RuntimeError]:
    """Do as :func:`exchange`, and return the ranks that did not send or take their tensor in time."""
    sends = [dist.P2POp(dist.isend, run, group=group, group_peer=peer) for peer, run in outgoing.items()]
    receives = [dist.P2POp(dist.irecv, run, group=group, group_peer=peer) for peer, run in incoming.items()]
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
