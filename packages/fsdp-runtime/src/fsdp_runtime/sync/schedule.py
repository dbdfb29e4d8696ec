"""Order a plan's transfers into rounds in which no rank holds more than one bucket of messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_runtime.errors import OptionError
from tp_plans.transfer import BlockTransfer, Box, TransferPlan, split_box, volume


@dataclass(frozen=True)
class Message:
    """What one rank sends to another in one round, as one run of bytes.

    Wider elements come first, so that every one is aligned.
    """

    source: int
    destination: int
    transfers: tuple[BlockTransfer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(each.nbytes for each in self.transfers)


#: Messages that are in flight together.
Round = Sequence[Message]

#: Messages begin at multiples of this many bytes, the size of the widest element.
ALIGNMENT = 8


def schedule_rounds(plan: TransferPlan, bucket_bytes: int) -> list[Round]:
    """Return the rounds of a plan, the same on every process.

    In a round a rank has at most ``bucket_bytes`` of messages, sent and received together, and one message for another
    rank.  A transfer goes into the first round in which both of its ranks have room, what a rank passes on into a later
    one than that in which it arrives.  Transfers that stay on their rank are left out.
    """
    limit = bucket_bytes // ALIGNMENT * ALIGNMENT
    used: list[dict[int, int]] = []
    messages: list[dict[tuple[int, int], list[BlockTransfer]]] = []
    first_open: dict[int, int] = defaultdict(int)
    arrives: dict[tuple[int, str, Box], int] = {}
    for each in split_transfers(plan, bucket_bytes):
        if each.is_local:
            continue
        place = max(first_open[each.source], first_open[each.destination])
        if each.is_relay:
            place = max(place, arrives[each.source, each.tensor, each.box] + 1)
        while True:
            if place == len(used):
                used.append(defaultdict(int))
                messages.append(defaultdict(list))
            fill = used[place]
            if max(fill[each.source], fill[each.destination]) + aligned(each.nbytes) <= limit:
                break
            place += 1
        for rank in (each.source, each.destination):
            used[place][rank] += aligned(each.nbytes)
            while first_open[rank] < len(used) and used[first_open[rank]][rank] >= limit:
                first_open[rank] += 1
        messages[place][each.source, each.destination].append(each)
        arrives[each.destination, each.tensor, each.box] = place
    itemsize = {name: tensor.itemsize for name, tensor in plan.destination.tensors.items()}
    return [
        [
            Message(source, destination, tuple(sorted(transfers, key=lambda each: -itemsize[each.tensor])))
            for (source, destination), transfers in sorted(pairs.items())
        ]
        for pairs in messages
    ]


def split_transfers(plan: TransferPlan, bucket_bytes: int) -> list[BlockTransfer]:
    """Return a plan's transfers, those larger than a bucket, of :data:`ALIGNMENT` bytes or more, in parts."""
    if bucket_bytes < ALIGNMENT:
        raise OptionError(f"bucket_bytes={bucket_bytes}: give {ALIGNMENT} or more, the bytes of the widest element")
    limit = bucket_bytes // ALIGNMENT * ALIGNMENT
    found: list[BlockTransfer] = []
    for each in plan.transfers:
        if each.nbytes <= limit:
            found.append(each)
            continue
        itemsize = plan.destination.tensors[each.tensor].itemsize
        parts = split_box(each.box, limit // itemsize)
        found += [replace(each, box=part, nbytes=volume(part) * itemsize) for part in parts]
    return found


def aligned(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
