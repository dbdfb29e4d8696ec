"""Differences to the last version: the rank that stores a box encodes them once; ranks send, relay and apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sync.codec import HEADER_BYTES, apply_changes, encode_changes, end_of_record
from fsdp_runtime.sync.point_to_point import CHANGES, SIZES, PointToPoint
from fsdp_runtime.sync.tensor_views import Sides
from tp_plans.boxes import Box
from tp_plans.transfer import BlockTransfer, TransferPlan

#: The record of each box of a tensor.
Records = Mapping[tuple[str, Box], Tensor]


class ArrivedChanges(NamedTuple):
    """The records that a rank received, with the bytes sent and received."""

    records: Records
    bytes_sent: int
    bytes_received: int


class Changes:
    """Sends and receives differences for this rank."""

    def __init__(self, plan: TransferPlan, sides: Sides, peers: PointToPoint) -> None:
        self._plan, self._sides, self._peers = plan, sides, peers
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
                values = self._sides.empty(block)
                self._sides.read(block, values)
                records[key] = encode_changes(self._sent.get(key), values)
        return records

    def remember(self, records: Records) -> None:
        """Keep a copy of the destinations' new values."""
        for block in self.own():
            key = (block.tensor, block.box)
            if key in records and key in self._sent:
                apply_changes(records[key], 0, self._sent[key])
            else:
                self._sent[key] = self._sides.empty(block)
                self._sides.read(block, self._sent[key])

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
                arrived.update(self._records_of(run, incoming[peer]))
            known.update(arrived)
            sent += sum(len(record) for parts in outgoing.values() for record in parts)
            received += sum(map(len, runs.values()))
        return ArrivedChanges(arrived, sent, received)

    def apply(self, records: Records) -> None:
        """Apply the received records to this rank's destination."""
        for block in self._sides.transfers:
            key = (block.tensor, block.box)
            if block.destination == self._sides.rank and key in records and not block.is_local:
                values = self._sides.empty(block)
                self._sides.read_back(block, values)
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

    def _records_of(self, run: Tensor, transfers: Sequence[BlockTransfer]) -> Iterator[tuple[tuple[str, Box], Tensor]]:
        offset = 0
        for block in transfers:
            end = end_of_record(run, offset, self._plan.destination.tensors[block.tensor].itemsize)
            yield (block.tensor, block.box), run[offset:end]
            offset = end
