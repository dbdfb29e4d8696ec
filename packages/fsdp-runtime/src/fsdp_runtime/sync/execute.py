"""Execute a transfer plan over a process group: rounds of at most one bucket are packed, exchanged and unpacked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import OptionError, WeightSyncError
from fsdp_runtime.sharded import block_view, inside
from fsdp_runtime.sync.groups import DEFAULT_TIMEOUT, ROUND, WINDOWS, Handshake, PointToPoint, rank_in
from fsdp_runtime.sync.model_layout import ModelShards, present_tensors
from fsdp_runtime.weights import DEFAULT_BUCKET_BYTES, DequantizedTensor
from tp_plans.boxes import Box, box_shape, split_box, volume
from tp_plans.transfer import BlockTransfer, TransferLayout, TransferPlan

#: Messages begin at multiples of this many bytes, the size of the widest element.
ALIGNMENT = 8


@dataclass(frozen=True)
class Message:
    """Bytes from one rank to another in one round; wider dtypes come first, so all elements are aligned."""

    source: int
    destination: int
    transfers: tuple[BlockTransfer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(transfer.nbytes for transfer in self.transfers)


#: The messages of a rank that are in flight together.
Round = Sequence[Message]


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
            sides.write(transfer, sides.read(transfer))  # rounded to the dtype of messages
    windows = 1  # enough if all messages fit in one round, which needs no communication; else the ranks agree
    if not fits_in_one_round(plan, bucket_bytes):
        handshake = Handshake(plan.ranks or (rank,), peers, where, WINDOWS)
        windows = max(number for (number,) in handshake.gather([windows_of(plan, transfers, bucket_bytes)]).values())
    run_rounds(sides, rounds_of(plan, transfers, windows), peers, where)


def run_rounds(sides: Sides, rounds: Sequence[Round], peers: PointToPoint, device: torch.device) -> None:
    """Run this rank's rounds, with one buffer for its largest round."""
    sizes = (sum(aligned(message.nbytes) for message in messages) for messages in rounds)
    buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)
    for messages in rounds:
        run_round(sides, messages, peers, buffer)


def run_round(sides: Sides, messages: Round, peers: PointToPoint, buffer: Tensor) -> None:
    """Run a round; raise if a rank does not send or receive its message in time."""
    outgoing, incoming = dict[int, Tensor](), dict[int, Tensor]()
    received: list[tuple[Message, Tensor]] = []
    offset = 0
    for message in messages:
        run = buffer[offset : offset + message.nbytes]
        offset += aligned(message.nbytes)
        if message.source == sides.rank:
            outgoing[message.destination] = run
            for transfer, values in message_values(sides.plan, message, run):
                sides.read(transfer, values)
        else:
            incoming[message.source] = run
            received.append((message, run))
    peers.exchange(outgoing, incoming, ROUND)
    for message, run in received:
        for transfer, values in message_values(sides.plan, message, run):
            sides.write(transfer, values)


def message_values(plan: TransferPlan, message: Message, run: Tensor) -> Iterator[tuple[BlockTransfer, Tensor]]:
    """Yield a message's transfers, and views of the message's bytes in the dtype and shape of each box."""
    parts = torch.split(run, [block.nbytes for block in message.transfers])
    for block, part in zip(message.transfers, parts, strict=True):
        yield block, part.view(torch_dtype(plan.destination, block.tensor)).view(box_shape(block.box))


def box_views(
    layout: TransferLayout, rank: int, local: Mapping[str, Tensor], tensor: str, box: Box
) -> Iterator[tuple[Box, Tensor]]:
    """Yield the parts of a box that a rank stores, each with its view in the rank's local tensors."""
    for part, block in layout.within(rank, tensor, box):
        yield part, block_view(local, tensor, block, part)


def torch_dtype(layout: TransferLayout, tensor: str) -> torch.dtype:
    """Return the dtype in which messages carry a tensor."""
    dtype: torch.dtype = getattr(torch, layout.tensors[tensor].dtype)
    return dtype


class Sides:
    """This rank's local tensors on both sides of a plan, and its transfers."""

    def __init__(
        self, plan: TransferPlan, rank: int, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]
    ) -> None:
        self.plan, self.rank, self.transfers = plan, rank, plan.for_rank(rank)
        self.source, self.destination = source, destination
        if packed := next((name for name, each in destination.items() if isinstance(each, DequantizedTensor)), None):
            raise WeightSyncError(
                f"{packed} of the destination is in packed bytes, which take no values of a transfer: send them to a "
                "model without Quantized"
            )

    @property
    def device(self) -> torch.device:
        """The device of the first local tensor."""
        tensors = (*self.source.values(), *self.destination.values())
        return tensors[0].device if tensors else torch.device("cpu")

    def require_tensors(self) -> None:
        """Look up every local tensor: a missing tensor raises before a message is sent."""
        for block in self.transfers:
            if block.source == self.rank and not block.is_relay:
                list(box_views(self.plan.source, self.rank, self.source, block.tensor, block.box))
            if block.destination == self.rank or (block.is_relay and block.source == self.rank):
                relays = block.is_relay and block.source == self.rank
                for _, view in box_views(self.plan.destination, self.rank, self.destination, block.tensor, block.box):
                    self._require_dtype(block.tensor, view.dtype, relays=relays)

    def _require_dtype(self, tensor: str, stored: torch.dtype, *, relays: bool) -> None:
        """Refuse a dtype that changes the meaning of sent values, such as FP8 without scales, or relays fewer bits."""
        sent = torch_dtype(self.plan.destination, tensor)
        if stored != sent and not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (stored, sent)):
            raise WeightSyncError(
                f"rank {self.rank} stores {tensor} in {stored} and is sent {sent}, which cannot be converted: give a "
                "tensor of the sent dtype, or send another dtype (dtype=, quantize=)"
            )
        if relays and torch.promote_types(stored, sent) != stored:
            raise WeightSyncError(
                f"rank {self.rank} stores {tensor} in {stored} and passes it on in {sent}, with fewer bits than it "
                "received: send the dtype that the engines store (dtype=), or plan without relay"
            )

    def read(self, block: BlockTransfer, values: Tensor | None = None, *, back: bool = False) -> Tensor:
        """Return a box of the source, or the destination's values for a relay or with ``back``; fill ``values``."""
        if values is None:
            dtype = torch_dtype(self.plan.destination, block.tensor)  # of messages
            values = torch.empty(box_shape(block.box), dtype=dtype, device=self.device)
        layout, local = self.plan.source, self.source
        if back or block.is_relay:
            layout, local = self.plan.destination, self.destination
        for part, view in box_views(layout, self.rank, local, block.tensor, block.box):
            values[inside(block.box, part)].copy_(view)
        return values

    def write(self, block: BlockTransfer, values: Tensor) -> None:
        """Write a box's values to all of this rank's destination tensors that hold a part of the box."""
        for part, view in box_views(self.plan.destination, self.rank, self.destination, block.tensor, block.box):
            view.copy_(values[inside(block.box, part)])


def windows_of(plan: TransferPlan, transfers: Sequence[BlockTransfer], bucket_bytes: int) -> int:
    """Return the number of equal windows that a rank needs: its messages in a window fit in one bucket."""
    # A power of two: a rank that needs fewer windows can use more, so the ranks agree on the largest number.
    limit, windows = bucket_bytes // ALIGNMENT * ALIGNMENT, 1
    while any(sum(aligned(e.nbytes) for e in each) > limit for each in _by_round(plan, transfers, windows).values()):
        windows *= 2
    return windows


def fits_in_one_round(plan: TransferPlan, bucket_bytes: int) -> bool:
    """Return whether every rank's messages fit in one bucket; equal on every rank, no communication."""
    spare = bucket_bytes - 2 * ALIGNMENT * len(plan.ranks) - ALIGNMENT
    return all(plan.bytes_sent(rank) + plan.bytes_received(rank) <= spare for rank in plan.ranks)


def rounds_of(plan: TransferPlan, transfers: Sequence[BlockTransfer], windows: int) -> list[Round]:
    """Return a rank's rounds, in order; a round has at most one message from one rank to another."""
    # The plan's transfers have positions on a line that is cut into equal windows. A round holds the transfers of one
    # window with the same number of earlier relays. All ranks have the same windows, so sender and receiver build the
    # same messages in the same order.
    tensors = plan.destination.tensors
    return [
        _messages(sorted(blocks, key=lambda transfer: (-tensors[transfer.tensor].itemsize, transfer.position)))
        for _, blocks in sorted(_by_round(plan, transfers, windows).items())
    ]


def _by_round(
    plan: TransferPlan, transfers: Iterable[BlockTransfer], windows: int
) -> dict[tuple[int, int], list[BlockTransfer]]:
    """The transfers between ranks by their rounds: the window, and the number of earlier relays."""
    rounds: dict[tuple[int, int], list[BlockTransfer]] = defaultdict(list)
    for transfer in transfers:
        if not transfer.is_local:
            rounds[transfer.position * windows // plan.nbytes, transfer.hop].append(transfer)
    return rounds


def _messages(transfers: Iterable[BlockTransfer]) -> list[Message]:
    pairs: dict[tuple[int, int], list[BlockTransfer]] = defaultdict(list)
    for transfer in transfers:
        pairs[transfer.source, transfer.destination].append(transfer)
    return [Message(source, destination, tuple(blocks)) for (source, destination), blocks in sorted(pairs.items())]


def split_transfers(plan: TransferPlan, transfers: Iterable[BlockTransfer], bucket_bytes: int) -> list[BlockTransfer]:
    """Return a plan's transfers; split larger ones to fit a bucket, which has at least :data:`ALIGNMENT` bytes."""
    if bucket_bytes < ALIGNMENT:
        raise OptionError(f"bucket_bytes={bucket_bytes}: give {ALIGNMENT} or more, the bytes of the widest element")
    limit = bucket_bytes // ALIGNMENT * ALIGNMENT
    parts: list[BlockTransfer] = []
    for transfer in transfers:
        if transfer.nbytes <= limit:
            parts.append(transfer)
            continue
        itemsize = plan.destination.tensors[transfer.tensor].itemsize
        position = transfer.position
        for part in split_box(transfer.box, limit // itemsize):
            nbytes = volume(part) * itemsize
            parts.append(replace(transfer, box=part, nbytes=nbytes, position=position))
            position += nbytes
    return parts


def aligned(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
