"""Order a rank's transfers into rounds in which it holds at most one bucket of messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fsdp_runtime.errors import OptionError
from tp_plans.boxes import split_box, volume
from tp_plans.transfer import BlockTransfer, TransferPlan


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

#: Messages begin at multiples of this many bytes, the size of the widest element.
ALIGNMENT = 8


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
