"""Plan a transfer: which box of which tensor each rank sends to each other rank."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from tp_plans.errors import TransferError
from tp_plans.transfer.block_transfer import BlockTransfer
from tp_plans.transfer.boxes import SHARED_BYTES, Box, difference, disjoint, full_box, intersection, split_box, volume
from tp_plans.transfer.layout import CheckpointTensor, TransferLayout
from tp_plans.transfer.least_loaded import LeastLoaded
from tp_plans.transfer.near_boxes import NearBoxes
from tp_plans.transfer.relays import owners_of, relayed_transfers


@dataclass(frozen=True)
class TransferPlan:
    """Every transfer between two layouts, in checkpoint order, and the layouts.

    Args:
        source: where the values are.
        destination: where they go.
        transfers: what goes from where to where; no element reaches a rank twice.
    """

    source: TransferLayout
    destination: TransferLayout
    transfers: tuple[BlockTransfer, ...]

    @cached_property
    def _totals(self) -> tuple[Mapping[int, int], Mapping[int, int], Mapping[int, int]]:
        sent: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        kept: dict[int, int] = defaultdict(int)
        for each in self.transfers:
            if each.is_local:
                kept[each.source] += each.nbytes
            else:
                sent[each.source] += each.nbytes
                received[each.destination] += each.nbytes
        return sent, received, kept

    def bytes_sent(self, rank: int) -> int:
        """Bytes that a rank sends to other ranks."""
        return self._totals[0].get(rank, 0)

    def bytes_received(self, rank: int) -> int:
        """Bytes that a rank receives from other ranks."""
        return self._totals[1].get(rank, 0)

    def bytes_kept(self, rank: int) -> int:
        """Bytes that a rank of both layouts copies from itself."""
        return self._totals[2].get(rank, 0)

    def fingerprint(self) -> int:
        """Return a number of 62 bits that is the same on every process for the same plan."""
        digest = hashlib.blake2b(digest_size=8)
        for layout in (self.source, self.destination):
            for name, tensor in layout.tensors.items():
                stored = [(each.rank, each.box, each.local, each.offset, each.dims) for each in layout.blocks(name)]
                digest.update(repr((name, tensor.shape, tensor.dtype, stored)).encode())
        if any(each.is_relay for each in self.transfers):
            digest.update(b"relays")
        return int.from_bytes(digest.digest(), "big") >> 2

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of either layout, in order."""
        return tuple(sorted({*self.source.ranks, *self.destination.ranks}))


def plan_transfer(source: TransferLayout, destination: TransferLayout, *, relay: bool = False) -> TransferPlan:
    """Decide which rank sends which block of each checkpoint tensor to which rank.

    Each element that a destination rank stores reaches it once, also where it stores copies; what the rank has itself
    is copied locally.  Where several ranks hold a block, the one with the fewest bytes to send sends it, large blocks
    in parts: first what has one sender is counted, then the rest from large to small.  The same plan comes out on
    every process, without communication.

    With ``relay``, each element leaves the source ranks once, however many replicas of an engine want it: the replicas
    pass it on, one to the next, the one that has sent least first.  No rank sends more than it receives for that.

    Args:
        source: the layout that has the values; every tensor of the destination must be in it.
        destination: the layout to fill; it may lack tensors of the source.
        relay: let destination ranks pass on what they received.

    Returns:
        The plan.

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
    if relay:
        return TransferPlan(source, destination, tuple(relayed_transfers(source, destination)))
    load: dict[int, int] = defaultdict(int)
    fixed: list[tuple[int, BlockTransfer]] = []
    shared: list[tuple[int, str, Box, Sequence[int], int, int]] = []
    order = 0
    remembered = _Providers()
    for name, tensor in destination.tensors.items():
        providers, itemsize = remembered.of_tensor(name, tensor, owners_of(source, name)), tensor.itemsize
        for rank, box in _wanted(destination, name):
            for part, elements, senders in providers(box, rank):
                nbytes = elements * itemsize
                if len(senders) == 1:
                    fixed.append((order, BlockTransfer(name, part, senders[0], rank, nbytes)))
                    load[senders[0]] += nbytes if senders[0] != rank else 0
                    order += 1
                    continue
                for small in [part] if nbytes <= SHARED_BYTES else split_box(part, SHARED_BYTES // itemsize):
                    shared.append((order, name, small, senders, rank, volume(small) * itemsize))
                    order += 1
    least = LeastLoaded(load)
    for place, name, box, senders, rank, nbytes in sorted(shared, key=lambda item: (-item[5], item[0])):
        sender = least.of(senders)
        load[sender] += nbytes
        fixed.append((place, BlockTransfer(name, box, sender, rank, nbytes)))
    fixed.sort(key=lambda item: item[0])
    return TransferPlan(source, destination, tuple(transfer for _, transfer in fixed))


def plan_cover(layout: TransferLayout) -> tuple[BlockTransfer, ...]:
    """Share out every element of a layout's tensors among the ranks that store it, each to one of them.

    Args:
        layout: must hold every element of every tensor.

    Returns:
        For each box the rank that answers for it, as source and destination.

    Raises:
        TransferError: no rank stores some part of a tensor.

    Example:
        >>> import tp_plans
        >>> tensors = {"weight": tp_plans.transfer.CheckpointTensor((4, 2))}
        >>> layout = tp_plans.transfer.mesh_layout(tensors, (2,), {"weight": [tp_plans.Replicate()]})
        >>> [(each.box, each.source) for each in tp_plans.transfer.plan_cover(layout)]
        [(((0, 4), (0, 2)), 0)]
    """
    load: dict[int, int] = defaultdict(int)
    found = []
    remembered, least = _Providers(), LeastLoaded(load)
    for name, tensor in layout.tensors.items():
        providers = remembered.of_tensor(name, tensor, owners_of(layout, name))
        for part, _, senders in providers(full_box(tensor.shape), None):
            for small in split_box(part, max(1, SHARED_BYTES // tensor.itemsize)):
                owner = least.of(senders)
                load[owner] += volume(small) * tensor.itemsize
                found.append(BlockTransfer(name, small, owner, owner, volume(small) * tensor.itemsize))
    return tuple(found)


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


def _wanted(layout: TransferLayout, name: str) -> Iterator[tuple[int, Box]]:
    """What each rank has to be given of a tensor, as boxes that do not overlap."""
    by_rank: dict[int, list[Box]] = defaultdict(list)
    for block in layout.blocks(name):
        by_rank[block.rank].append(block.box)
    for rank in sorted(by_rank):
        for box in by_rank[rank] if len(by_rank[rank]) == 1 else disjoint(by_rank[rank]):
            yield rank, box


class _Providers:
    """Which ranks can send which part of a box; remembers how boxes are cut, as replicas and experts are cut alike."""

    def __init__(self) -> None:
        self._indices: dict[tuple[Box, ...], tuple[int, NearBoxes]] = {}
        self._cuts: dict[tuple[Box, tuple[Box, ...], int], list[tuple[Box, int, Box]]] = {}

    def of_tensor(
        self, name: str, tensor: CheckpointTensor, owners: Mapping[Box, Sequence[int]]
    ) -> Callable[[Box, int | None], list[tuple[Box, int, Sequence[int]]]]:
        """Return a function of a box, and of the rank that wants it, that lists its parts with elements and senders.

        What the rank has itself it sends itself.

        Args:
            name: the tensor's name.
            tensor: its shape.
            owners: the ranks that store each box.
        """
        number, index = self._indexed(tuple(owners))
        held: dict[int, list[Box]] = defaultdict(list)
        for stored, ranks in owners.items():
            for each in ranks:
                held[each].append(stored)
        indices: dict[int, NearBoxes] = {}

        def providers(box: Box, rank: int | None) -> list[tuple[Box, int, Sequence[int]]]:
            own: tuple[Box, ...] = ()
            if rank is not None and rank in held:
                if rank not in indices:
                    indices[rank] = NearBoxes(held[rank])
                own = tuple(indices[rank].near(box))
            if (box, own, number) not in self._cuts:
                self._cuts[box, own, number] = _cut(name, tensor, box, chain(own, index.near(box)))
            cuts = self._cuts[box, own, number]
            if rank is not None and own:
                return [(part, n, [rank] if by in own else owners[by]) for part, n, by in cuts]
            return [(part, n, owners[by]) for part, n, by in cuts]

        return providers

    def _indexed(self, stored: tuple[Box, ...]) -> tuple[int, NearBoxes]:
        """Some boxes by place, with a short name, since the hash of a long tuple is computed at each use."""
        if stored not in self._indices:
            self._indices[stored] = len(self._indices), NearBoxes(stored)
        return self._indices[stored]


def _cut(name: str, tensor: CheckpointTensor, box: Box, stored: Iterable[Box]) -> list[tuple[Box, int, Box]]:
    """Cut a box by stored boxes; return each part with its elements and the first stored box that has it."""
    found = []
    left = [box] if volume(box) else []
    for other in stored:
        if not left:
            break
        remaining: list[Box] = []
        for piece in left:
            part = intersection(piece, other)
            if part is None:
                remaining.append(piece)
                continue
            found.append((part, volume(part), other))
            remaining += [] if part == piece else difference(piece, part)
        left = remaining
    if left:
        raise TransferError(
            f"no source rank stores {left[0]} of {name}, which has shape {tensor.shape}: the source layout must hold "
            "every part of the tensors that it sends"
        )
    return found
