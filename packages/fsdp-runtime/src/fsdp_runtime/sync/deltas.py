"""Differences to the last version: the rank that stores a box encodes them once; ranks send, relay and apply.

The changed elements of a box are encoded bit for bit: all values, or the changed values and the gaps between them.  A
record begins with two 8-byte integers: bytes per gap plus 8 times the bytes of all gaps, and the number of values.
With 0 bytes per gap, all values follow.  The largest gap skips as many elements, without a changed value after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sharded import WORDS
from fsdp_runtime.sync.execute import Sides
from fsdp_runtime.sync.groups import CHANGES, SIZES, PointToPoint
from tp_plans.boxes import Box
from tp_plans.transfer import BlockTransfer

HEADER_BYTES = 16


def encode_changes(old: Tensor | None, new: Tensor) -> Tensor:
    """Return the record ``[bytes]``, uint8, from ``old`` to ``new``: at most 16 bytes more than the values."""
    values = _bits(new)
    if old is not None:
        where = (_bits(old) != values).nonzero().view(-1)
        gaps = torch.diff(where, prepend=where.new_full((1,), -1)) - 1
        sizes = {width: width * (len(gaps) + int((gaps // _longest(width)).sum())) for width in (1, 2)}
        width = min(sizes, key=sizes.__getitem__)
        if not len(where) or sizes[width] + len(where) * values.itemsize < values.nbytes:
            return _record(width, _pack_gaps(gaps, width), values[where])
    return _record(0, values.new_empty(0, dtype=torch.uint8), values)


def apply_changes(records: Tensor, offset: int, target: Tensor) -> int:
    """Apply the record at ``offset`` to contiguous old values in place; return the offset after the record."""
    flat = _bits(target)
    width, start, gap_bytes, count, end = _parsed(records, offset, flat.itemsize)
    if not 0 <= count <= len(flat) or (width == 0 and count != len(flat)):
        raise WeightSyncError(
            f"a record of {count} values in {end - start} bytes does not fit {len(flat)} elements of "
            f"{flat.itemsize} bytes: ask for a full update"
        )
    values = records[start + gap_bytes : end].clone().view(flat.dtype)
    if width == 0:
        flat.copy_(values)
        return end
    where = _unpack_gaps(records[start : start + gap_bytes].clone(), width)
    if len(where) != count or (count and int(where[-1]) >= len(flat)):
        raise WeightSyncError(f"a record's {count} positions do not fit {len(flat)} elements: ask for a full update")
    flat[where] = values
    return end


def _parsed(records: Tensor, offset: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """Return bytes per gap, offset of the gaps, bytes of all gaps, number of values, and end of the record."""
    header = records[offset : offset + HEADER_BYTES].clone()
    if len(header) != HEADER_BYTES:
        raise WeightSyncError(f"an update ends at byte {len(records)}, in the middle of a record: ask for a full one")
    first, count = (int(number) for number in header.view(torch.int64))
    width, gap_bytes, start = first % 8, first // 8, offset + HEADER_BYTES
    end = start + gap_bytes + count * itemsize
    if width > 2 or count < 0 or gap_bytes < 0 or gap_bytes % max(width, 1) or end > len(records):
        raise WeightSyncError(
            f"a record of {count} values in {end - start} bytes does not fit an update of {len(records)} bytes: "
            "ask for a full update"
        )
    return width, start, gap_bytes, count, end


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers of the same size, flat."""
    return tensor.contiguous().view(-1).view(WORDS[tensor.element_size()])


def _record(width: int, gaps: Tensor, values: Tensor) -> Tensor:
    header = torch.tensor([width + 8 * len(gaps), len(values)], dtype=torch.int64, device=values.device)
    return torch.cat([header.view(torch.uint8), gaps, values.contiguous().view(torch.uint8)])


def _longest(width: int) -> int:
    return (1 << 8 * width) - 1


def _pack_gaps(gaps: Tensor, width: int) -> Tensor:
    longest = _longest(width)
    counts = gaps // longest + 1
    packed = torch.full((int(counts.sum()),), longest, dtype=torch.int64, device=gaps.device)
    packed[counts.cumsum(0) - 1] = gaps % longest
    return packed.to(torch.uint8) if width == 1 else packed.to(torch.int16).view(torch.uint8)


def _unpack_gaps(packed: Tensor, width: int) -> Tensor:
    longest = _longest(width)
    steps = packed.long() if width == 1 else packed.view(torch.int16).long() & longest
    is_change = steps != longest
    # A change advances by its gap and one element more.
    where: Tensor = ((steps + is_change).cumsum(0) - 1)[is_change]
    return where


#: The record of each box of a tensor.
Records = Mapping[tuple[str, Box], Tensor]


class ArrivedChanges(NamedTuple):
    """The records that a rank received, with the bytes sent and received."""

    records: Records
    bytes_sent: int
    bytes_received: int


class Changes:
    """Sends and receives differences for this rank."""

    def __init__(self, sides: Sides, peers: PointToPoint) -> None:
        self._sides, self._peers = sides, peers
        self._sent: dict[tuple[str, Box], Tensor] = {}

    def own(self) -> list[BlockTransfer]:
        """Outgoing transfers of this rank's own blocks (no relays)."""
        direct = (block for block in self._sides.transfers if not (block.is_local or block.is_relay))
        return [block for block in direct if block.source == self._sides.rank]

    def encode(self) -> Records:
        """Return one record per box that this rank sends, shared by all destinations."""
        records: dict[tuple[str, Box], Tensor] = {}
        for block in self.own():
            key = (block.tensor, block.box)
            if key not in records:
                records[key] = encode_changes(self._sent.get(key), self._sides.read(block))
        return records

    def remember(self, records: Records) -> None:
        """Keep a copy of the destinations' new values."""
        for block in self.own():
            key = (block.tensor, block.box)
            if key in records and key in self._sent:
                apply_changes(records[key], 0, self._sent[key])
            else:
                self._sent[key] = self._sides.read(block)

    def exchange(self, records: Records, transfers: Sequence[BlockTransfer]) -> ArrivedChanges:
        """Send this rank's records and relay received records, one relay step at a time."""
        rank, sent, received = self._sides.rank, 0, 0
        known, arrived = dict(records), dict[tuple[str, Box], Tensor]()
        hops = attrgetter("hop")  # the number of earlier relays of a box
        for _, step in groupby(sorted(transfers, key=hops), hops):
            outgoing: dict[int, list[Tensor]] = {}
            incoming: dict[int, list[BlockTransfer]] = {}
            for block in step:
                if block.source == rank:
                    outgoing.setdefault(block.destination, []).append(known[block.tensor, block.box])
                if block.destination == rank:
                    incoming.setdefault(block.source, []).append(block)
            runs = self._exchange({peer: torch.cat(parts) for peer, parts in outgoing.items()}, incoming)
            for peer, run in runs.items():
                offset = 0
                for block in incoming[peer]:
                    *_, end = _parsed(run, offset, self._sides.plan.destination.tensors[block.tensor].itemsize)
                    arrived[block.tensor, block.box] = run[offset:end]
                    offset = end
            known.update(arrived)
            sent += sum(len(record) for parts in outgoing.values() for record in parts)
            received += sum(map(len, runs.values()))
        return ArrivedChanges(arrived, sent, received)

    def apply(self, records: Records) -> None:
        """Apply the received records to this rank's destination."""
        for block in self._sides.transfers:
            key = (block.tensor, block.box)
            if block.destination == self._sides.rank and key in records and not block.is_local:
                values = self._sides.read(block, back=True)
                apply_changes(records[key], 0, values)
                self._sides.write(block, values)

    def _exchange(
        self, messages: Mapping[int, Tensor], incoming: Mapping[int, Sequence[BlockTransfer]]
    ) -> dict[int, Tensor]:
        """Exchange messages with peers, after their lengths; return the received messages by rank."""
        device = self._sides.device
        sizes = {peer: torch.tensor([len(message)], device=device) for peer, message in messages.items()}
        announced = {peer: torch.zeros(1, dtype=torch.int64, device=device) for peer in incoming}
        self._peers.exchange(sizes, announced, SIZES)
        runs = {}
        for peer, size in announced.items():
            most = sum(block.nbytes + HEADER_BYTES for block in incoming[peer])
            if not 0 <= int(size) <= most:
                raise WeightSyncError(f"rank {peer} announced {int(size)} bytes for blocks of {most}")
            runs[peer] = torch.empty(int(size), dtype=torch.uint8, device=device)
        self._peers.exchange(messages, runs, CHANGES)
        return runs
