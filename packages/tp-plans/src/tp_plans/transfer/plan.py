"""Plan a transfer: the boxes of tensors that each rank sends to each other rank."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from tp_plans.boxes import Box, full_box
from tp_plans.errors import TransferError
from tp_plans.transfer.kinds import CutPart, Kind, Move, kinds_of, share_parts
from tp_plans.transfer.layout import TransferLayout
from tp_plans.transfer.patterns import Copies, Pattern, Placed

_Key = TypeVar("_Key", bound=Hashable)

#: Ranks have the same plan only if they choose senders in the same way.
_CHOICE = b"2"


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """A box of a checkpoint tensor that one rank sends to another."""

    tensor: str  # the checkpoint tensor
    box: Box  # the part of it
    source: int  # the rank that sends
    destination: int  # the rank that receives; the source itself where it stores the box already
    nbytes: int  # bytes of the box in the dtype that is sent
    # the rank of the source layout that the box comes from, if ``source`` relays it; else ``None``
    origin: int | None = None
    # the bytes of the plan's earlier transfers, the same on both ranks; transfers of a chain have one position
    position: int = 0
    hop: int = 0  # the number of ranks that passed the box on earlier; with :attr:`direct`, that would have done so

    @property
    def is_local(self) -> bool:
        """Whether the box stays on its rank, as a copy."""
        return self.source == self.destination

    @property
    def is_relay(self) -> bool:
        """Whether the sender relays a received block."""
        return self.origin is not None

    @property
    def direct(self) -> BlockTransfer:
        """The same box from the rank of the source layout, to the same destination."""
        return self if self.origin is None else replace(self, source=self.origin, origin=None)


class TransferPlan:
    """The transfers between two layouts: tensors with equal layouts are planned once, and repeated.

    Made by :func:`plan_transfer`.  Totals are computed without a list of the transfers, which can have hundreds of
    millions: a rank asks for its own with :meth:`for_rank`.

    Args:
        source: where the values are.
        destination: where they go.
        relay: whether destination ranks pass received blocks on.

    Raises:
        TransferError: the source lacks a part of a tensor.
    """

    def __init__(self, source: TransferLayout, destination: TransferLayout, *, relay: bool = False) -> None:
        self.source, self.destination, self.relay = source, destination, relay
        self._kinds = kinds_of(source, destination, relay=relay)
        self._load, self._spared = share_parts(self._kinds)

    def for_rank(self, rank: int, *, direct: bool = False) -> list[BlockTransfer]:
        """Return the transfers that a rank sends, receives and keeps, in checkpoint order.

        Args:
            rank: a rank of either layout; any other has none.
            direct: without relays: the source rank sends to each rank of a chain.
        """
        transfers: list[BlockTransfer] = []
        for kind in self._kinds:
            for part in kind.parts_of(rank):
                for move in kind.moves(part):
                    if direct and move.origin is not None:
                        move = move._replace(source=move.origin, origin=None)
                    if rank in (move.source, move.destination):
                        transfers += self._transfers(kind, part, move)
        return sorted(transfers, key=lambda transfer: (transfer.position, transfer.hop))

    @cached_property
    def transfers(self) -> tuple[BlockTransfer, ...]:
        """Every transfer, in checkpoint order; no element reaches a rank twice.  For small plans."""
        moves = ((kind, part, move) for kind in self._kinds for part in kind.parts for move in kind.moves(part))
        listed = [transfer for kind, part, move in moves for transfer in self._transfers(kind, part, move)]
        return tuple(sorted(listed, key=lambda transfer: (transfer.position, transfer.hop)))

    def part(self, transfers: Iterable[BlockTransfer]) -> TransferPlan:
        """Return a plan of some of the transfers, with their totals, between the same ranks and layouts.

        Of one rank's transfers, the totals are right for that rank.
        """
        return _PlanPart(self, transfers)

    def _transfers(self, kind: Kind, part: CutPart, move: Move) -> Iterator[BlockTransfer]:
        inside = part.start + move.copy * part.nbytes
        for name in kind.tensors[move.first : move.last]:
            position = self._positions[name] + inside
            yield BlockTransfer(
                name, part.box, move.source, move.destination, part.nbytes, move.origin, position, move.hop
            )

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        """Bytes of all tensors before each one that leave the source."""
        nbytes = {name: size for kind in self._kinds for size in [kind.nbytes] for name in kind.tensors}
        names = list(self.destination.tensors)
        return dict(zip(names, accumulate((nbytes[name] for name in names), initial=0), strict=False))

    @cached_property
    def nbytes(self) -> int:
        """The length of the line of all transfers' positions, in bytes."""
        return self.bytes_wanted

    @cached_property
    def _sent(self) -> Mapping[int, int]:
        passed_on = ((rank, nbytes - self._spared[rank]) for rank, nbytes in self._received.items() if self.relay)
        return _summed([*self._load.items(), *passed_on])

    @cached_property
    def _received(self) -> Mapping[int, int]:
        return self._bytes_by_rank(lambda part: part.receivers)

    @cached_property
    def _kept(self) -> Mapping[int, int]:
        return self._bytes_by_rank(lambda part: part.keepers)

    def _bytes_by_rank(self, ranks_of: Callable[[CutPart], tuple[int, ...]]) -> Mapping[int, int]:
        parts = ((kind, part) for kind in self._kinds for part in kind.parts)
        sums = _summed((ranks_of(part), part.nbytes * len(kind.tensors)) for kind, part in parts)
        return _summed((rank, nbytes) for ranks, nbytes in sums.items() for rank in ranks)

    def bytes_sent(self, rank: int) -> int:
        """Bytes that a rank sends to other ranks."""
        return self._sent.get(rank, 0)

    def bytes_received(self, rank: int) -> int:
        """Bytes that a rank receives from other ranks."""
        return self._received.get(rank, 0)

    def bytes_kept(self, rank: int) -> int:
        """Bytes that a rank of both layouts copies from itself."""
        return self._kept.get(rank, 0)

    def fingerprint(self) -> int:
        """Return a number of 62 bits that is the same on every process for the same plan."""
        digest = hashlib.blake2b(_CHOICE, digest_size=8)
        for layout in (self.source, self.destination):
            digest.update(layout.digest())
        if any(len(part.receivers) > part.copies > 0 for kind in self._kinds for part in kind.parts):
            digest.update(b"relays")
        return int.from_bytes(digest.digest(), "big") >> 2

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of either layout, in order."""
        return tuple(sorted({*self.source.ranks, *self.destination.ranks}))

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that receive or keep something, in order."""
        return tuple(rank for rank in self.destination.ranks if self.bytes_received(rank) + self.bytes_kept(rank))

    @property
    def bytes_wanted(self) -> int:
        """Bytes that leave the source ranks, without relayed bytes."""
        return sum(self._load.values())


class _PlanPart(TransferPlan):
    """Some of a plan's transfers; a part has no fingerprint."""

    def __init__(self, plan: TransferPlan, transfers: Iterable[BlockTransfer]) -> None:
        self.source, self.destination, self.relay = plan.source, plan.destination, plan.relay
        self.nbytes, self.transfers = plan.nbytes, tuple(transfers)
        away = [transfer for transfer in self.transfers if not transfer.is_local]
        self._load = _summed((transfer.source, transfer.nbytes) for transfer in away if not transfer.is_relay)
        self._sent = _summed((transfer.source, transfer.nbytes) for transfer in away)
        self._received = _summed((transfer.destination, transfer.nbytes) for transfer in away)
        self._kept = _summed((transfer.source, transfer.nbytes) for transfer in self.transfers if transfer.is_local)

    def for_rank(self, rank: int, *, direct: bool = False) -> list[BlockTransfer]:
        """Return the transfers among them that a rank sends, receives and keeps."""
        listed = (transfer.direct if direct else transfer for transfer in self.transfers)
        return [transfer for transfer in listed if rank in (transfer.source, transfer.destination)]


def _summed(numbers: Iterable[tuple[_Key, int]]) -> dict[_Key, int]:
    sums: dict[_Key, int] = defaultdict(int)
    for key, number in numbers:
        sums[key] += number
    return dict(sums)


def plan_transfer(source: TransferLayout, destination: TransferLayout, *, relay: bool = False) -> TransferPlan:
    """Decide the sender and the receiver of each block of each checkpoint tensor.

    Each element that a destination rank stores reaches it once, even if the rank stores copies; blocks on the rank
    itself are copied locally.  If several ranks hold a block, they share the sending evenly, large blocks in parts.
    Every process computes the same plan, without communication.  Tensors with equal layouts, as in a model's layers,
    are planned once.

    With ``relay``, each element leaves the source ranks once, however many replicas of an engine want it: the replicas
    pass it on, one to the next, and take turns at the end.  No rank sends more than it receives for that.

    Args:
        source: the layout that has the values; every tensor of the destination must be in it.
        destination: the layout to fill; it may lack tensors of the source.
        relay: let destination ranks pass received blocks on.

    Raises:
        TransferError: the source lacks a tensor or a part of one, or shapes or dtypes differ.

    Example:
        >>> import tp_plans
        >>> tensors = {"weight": tp_plans.transfer.CheckpointTensor((4, 2))}
        >>> trainer = tp_plans.transfer.mesh_layout(tensors, (2,), {"weight": [tp_plans.Shard(0)]})
        >>> engine = tp_plans.transfer.mesh_layout(tensors, (1,), {"weight": [tp_plans.Replicate()]}).shifted(2)
        >>> for each in tp_plans.transfer.plan_transfer(trainer, engine).transfers:
        ...     print(each.tensor, each.box, f"{each.source} -> {each.destination}", each.nbytes)
        weight ((0, 2), (0, 2)) 0 -> 2 8
        weight ((2, 4), (0, 2)) 1 -> 2 8
        >>> replicas = tp_plans.transfer.mesh_layout(tensors, (2,), {"weight": [tp_plans.Replicate()]}).shifted(2)
        >>> plan = tp_plans.transfer.plan_transfer(trainer, replicas, relay=True)
        >>> plan.bytes_sent(0), plan.bytes_sent(1), plan.bytes_sent(2), plan.bytes_sent(3)
        (8, 8, 8, 8)
    """
    _require_same_tensors(source, destination)
    return TransferPlan(source, destination, relay=relay)


def plan_cover(layout: TransferLayout, *, rank: int | None = None) -> tuple[BlockTransfer, ...]:
    """Share out every element of a layout's tensors among the ranks that store it; one rank answers for each.

    Args:
        layout: must hold every element of every tensor.
        rank: only this rank's blocks; ``None`` for all.

    Returns:
        For each box the rank that answers for it, as source and destination.

    Raises:
        TransferError: no rank stores some part of a tensor.

    Example:
        >>> import tp_plans
        >>> tensors = {"weight": tp_plans.transfer.CheckpointTensor((4, 2))}
        >>> layout = tp_plans.transfer.mesh_layout(tensors, (2,), {"weight": [tp_plans.Shard(0)]})
        >>> [(each.box, each.source) for each in tp_plans.transfer.plan_cover(layout)]
        [(((0, 2), (0, 2)), 0), (((2, 4), (0, 2)), 1)]
    """
    everything = {  # of a rank that has none of it
        shape: Pattern([Copies((max(layout.ranks, default=0) + 1,), full_box(shape), 0, (0,) * len(shape), ())])
        for shape in {tensor.shape for tensor in layout.tensors.values()}
    }
    reader = {name: Placed(everything[tensor.shape], (name,)) for name, tensor in layout.tensors.items()}
    plan = TransferPlan(layout, TransferLayout.placed(layout.tensors, reader))
    transfers = plan.transfers if rank is None else plan.for_rank(rank)
    return tuple(replace(transfer, destination=transfer.source) for transfer in transfers)


def _require_same_tensors(source: TransferLayout, destination: TransferLayout) -> None:
    missing = [name for name in destination.tensors if name not in source.tensors]
    if missing:
        raise TransferError(
            f"the source lacks {len(missing)} of the destination's {len(destination.tensors)} tensors, first "
            f"{missing[0]}: export the names that the destination knows, or leave them out of its layout"
        )
    for name, tensor in destination.tensors.items():
        if source.tensors[name] != tensor:
            raise TransferError(
                f"{name} is {source.tensors[name].shape} in {source.tensors[name].dtype} at the source and "
                f"{tensor.shape} in {tensor.dtype} at the destination: both layouts name the values as they are sent"
            )
