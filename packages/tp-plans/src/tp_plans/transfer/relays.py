"""Transfers in which each element leaves the source ranks once, and destination ranks pass it on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from tp_plans.errors import TransferError
from tp_plans.transfer.block_transfer import BlockTransfer
from tp_plans.transfer.boxes import SHARED_BYTES, Box, cells, intersection, split_box, volume
from tp_plans.transfer.layout import TransferLayout


def relayed_transfers(source: TransferLayout, destination: TransferLayout) -> list[BlockTransfer]:
    """Plan the transfers of each cell of each tensor along a chain of the ranks that want it.

    A chain, not a tree: each rank sends at most what it receives, and parts follow one another, so that the time is
    that of one copy and of a part per rank.

    Args:
        source: the layout that has the values.
        destination: the layout to fill; its tensors are in the source.

    Returns:
        Transfers in checkpoint order; those of a chain in its order.

    Raises:
        TransferError: the source lacks a part of a tensor.
    """
    load: dict[int, int] = defaultdict(int)
    chains: list[tuple[int, str, Box, Sequence[int], Sequence[int], int]] = []
    found: list[tuple[int, BlockTransfer]] = []
    remembered: dict[tuple[tuple[Box, ...], tuple[Box, ...]], list[tuple[Box, list[Box], list[Box]]]] = {}
    for name, tensor in destination.tensors.items():
        held, wanted = owners_of(source, name), owners_of(destination, name)
        key = tuple(held), tuple(wanted)
        if key not in remembered:
            remembered[key] = _wanted_cells(*key)
        for cell, having, wanting in remembered[key]:
            if not having:
                raise TransferError(
                    f"no source rank stores {cell} of {name}, which has shape {tensor.shape}: the source layout must "
                    "hold every part of the tensors that it sends"
                )
            holders = sorted({rank for box in having for rank in held[box]})
            ranks = sorted({rank for box in wanting for rank in wanted[box]})
            others = [rank for rank in ranks if rank not in holders]
            nbytes = volume(cell) * tensor.itemsize
            found += [(len(chains), BlockTransfer(name, cell, r, r, nbytes)) for r in ranks if r in holders]
            for part in split_box(cell, max(1, SHARED_BYTES // tensor.itemsize)) if others else ():
                chains.append((len(chains), name, part, holders, others, volume(part) * tensor.itemsize))
    for place, name, part, senders, receivers, nbytes in sorted(chains, key=lambda item: (-item[-1], item[0])):
        origin = min(senders, key=lambda each: (load[each], each))
        chain = [origin, *sorted(receivers, key=lambda each: (load[each], each))]
        for sender, receiver in pairwise(chain):
            load[sender] += nbytes
            passed_on = None if sender == origin else origin
            found.append((place, BlockTransfer(name, part, sender, receiver, nbytes, passed_on)))
    found.sort(key=lambda item: item[0])
    return [transfer for _, transfer in found]


def owners_of(layout: TransferLayout, name: str) -> dict[Box, list[int]]:
    """The ranks that store each box of a tensor."""
    owners: dict[Box, dict[int, None]] = {}
    for block in layout.blocks(name):
        owners.setdefault(block.box, {})[block.rank] = None
    return {box: list(ranks) for box, ranks in owners.items()}


def _wanted_cells(held: Sequence[Box], wanted: Sequence[Box]) -> list[tuple[Box, list[Box], list[Box]]]:
    """Cut what is wanted by the borders of all boxes; each cell with the boxes that hold it and that want it."""
    found = []
    for cell in cells((*wanted, *held)):
        wanting = [box for box in wanted if intersection(box, cell) == cell]
        if wanting:
            found.append((cell, [box for box in held if intersection(box, cell) == cell], wanting))
    return found
