"""One rank's part in the rounds of a transfer: pack what it sends, exchange, unpack what it received."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_runtime.sync.local_sides import Sides, message_values
from fsdp_runtime.sync.point_to_point import ROUND, TAKEN, PointToPoint
from fsdp_runtime.sync.schedule import Message, Round, aligned
from fsdp_runtime.sync.shared_buckets import SharedBuckets


class RankRounds:
    """This rank's buffer and its exchanges.

    Args:
        rounds: all of the plan; they say how large the buffer has to be.
        sides: this rank's tensors.
        peers: the exchanges of rounds.
        device: where the group takes tensors from.
        shared: memory for messages that stay on this host; ``None`` to send all of them over the group.
    """

    def __init__(
        self,
        rounds: Sequence[Round],
        sides: Sides,
        peers: PointToPoint,
        device: torch.device,
        shared: SharedBuckets | None,
    ) -> None:
        self._sides, self._peers, self._shared, self._device = sides, peers, shared, device
        sizes = (sum(aligned(each.nbytes) for each in self._over_group(messages)) for messages in rounds)
        self._buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)

    def run(self, messages: Round) -> None:
        """Do a round; a rank that does not send or take its message in time is an error."""
        rank, shared = self._sides.rank, self._shared
        runs: list[tuple[Message, Tensor, Tensor]] = []  # messages, their bytes, and what the group carries
        offset = 0
        for message in self._over_group(messages):
            run = self._buffer[offset : offset + message.nbytes]
            runs.append((message, run, run))
            offset += aligned(message.nbytes)
        local = [] if shared is None else [each for each in self._own(messages) if shared.shares(each)]
        if shared is not None:
            runs += [(each, shared.run(messages, each), self._signal()) for each in local]
        for message, run, _ in runs:
            if message.source == rank:
                for each, values in message_values(self._sides.plan, message, run):
                    self._sides.read(each, values)
        outgoing = {message.destination: carried for message, _, carried in runs if message.source == rank}
        incoming = {message.source: carried for message, _, carried in runs if message.destination == rank}
        self._peers.exchange(outgoing, incoming, ROUND)
        for message, run, _ in runs:
            if message.destination == rank:
                for each, values in message_values(self._sides.plan, message, run):
                    self._sides.write(each, values)
        # A bucket is written again only when what it held has been taken.
        taken = {each.source: self._signal() for each in local if each.destination == rank}
        freed = {each.destination: self._signal() for each in local if each.source == rank}
        self._peers.exchange(taken, freed, TAKEN)

    def _signal(self) -> Tensor:
        """What the group carries for a message in shared memory."""
        return torch.zeros(1, dtype=torch.uint8, device=self._device)

    def _own(self, messages: Round) -> list[Message]:
        return [each for each in messages if self._sides.rank in (each.source, each.destination)]

    def _over_group(self, messages: Round) -> list[Message]:
        shared = self._shared
        return [each for each in self._own(messages) if shared is None or not shared.shares(each)]
