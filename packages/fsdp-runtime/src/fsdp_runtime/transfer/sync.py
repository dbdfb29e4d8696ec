"""Repeated transfers: all weights at first, then what changed, along a chain of versions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.argument_types import checked
from fsdp_runtime.errors import OptionError, WeightSyncError
from fsdp_runtime.transfer.codec import HEADER_BYTES, apply_changes, encode_changes
from fsdp_runtime.transfer.execute import DEFAULT_TIMEOUT, Sides, exchange, execute_transfer
from fsdp_runtime.transfer.views import torch_dtype
from fsdp_runtime.weights.stream import DEFAULT_BUCKET_BYTES
from tp_plans import BlockTransfer, TransferPlan
from tp_plans.transfer.boxes import Box, box_shape

#: The version of a rank that has none: it takes a full update only.
NO_VERSION = -1


@dataclass(frozen=True)
class SyncReport:
    """What one update did, on this rank.

    Args:
        version: the version that the destination ranks now hold.
        full_ranks: the destination ranks that were sent all of their weights.
        bytes_sent: bytes that this rank sent.
        bytes_received: bytes that this rank received.
        bytes_full: bytes that this rank would have sent and received in a full update.
    """

    version: int
    full_ranks: tuple[int, ...]
    bytes_sent: int
    bytes_received: int
    bytes_full: int


@dataclass(frozen=True)
class _State:
    """What a rank says of itself before an update."""

    chain: int
    version: int
    requested: int
    is_source: bool
    record_bytes: int


class WeightSync:
    """The updates of a destination's weights from a source's, one per training step.

    The first update sends everything.  Later ones send the elements whose bits changed in the dtype that is sent, as a
    difference to the last version, to each destination rank that holds that version; any other, a restarted or a newly
    built one, is sent all of its weights.  Where the differences of an update are not smaller than full weights, all
    ranks are sent full weights.

    Destinations apply differences once those of every rank have arrived, and hold their old weights until then; full
    weights are written as they arrive.  After a failed update every rank that took part asks for a full one.  Build the
    object on every rank of the plan; each source rank keeps a copy of the values that it sent, in the dtype that is
    sent.

    Args:
        plan: the same on every rank.
        source: this rank's local tensors, if it sends.
        destination: this rank's local tensors, if it receives.
        group: the process group whose ranks the plan names; ``None`` for the world.
        bucket_bytes: the bucket of full updates; see :func:`execute_transfer`.
        timeout: see :func:`execute_transfer`.
        delta: send differences; ``False`` sends full weights always and keeps no copy.

    Example:
        >>> import torch, tp_plans
        >>> from fsdp_runtime import ModelShards, WeightSync
        >>> trained, engine = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        >>> shards, target = ModelShards(trained), ModelShards(engine)
        >>> plan = tp_plans.plan_transfer(shards.layout, target.layout)
        >>> sync = WeightSync(plan, source=shards.local, destination=target.local)
        >>> sync.update(1).version
        1
        >>> torch.equal(trained.weight, engine.weight)
        True
    """

    @checked
    def __init__(
        self,
        plan: TransferPlan,
        *,
        source: Mapping[str, Tensor] | None = None,
        destination: Mapping[str, Tensor] | None = None,
        group: ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: timedelta = DEFAULT_TIMEOUT,
        delta: bool = True,
    ) -> None:
        self._plan, self._group = plan, group
        self._bucket_bytes, self._timeout, self._delta = bucket_bytes, timeout, delta
        self._rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._sides = Sides(plan, self._rank, source or {}, destination or {})
        self._sides.require_tensors()
        self._chain, self._version = 0, NO_VERSION
        self._sent: dict[tuple[str, Box], Tensor] = {}

    @property
    def version(self) -> int:
        """The version of the last update that this rank completed, -1 for none."""
        return self._version

    @torch.no_grad()
    def update(self, version: int) -> SyncReport:
        """Bring the destination to the source's present weights.  Collective over the ranks of the group.

        Args:
            version: the number of the new version, larger than the last; the same on every rank.

        Returns:
            What this rank sent and received.

        Raises:
            OptionError: ranks give different versions, or one that is not larger than the last, so that an update would
                be repeated or out of order; the same error on every rank, and nothing has changed.
            WeightSyncError: another rank did not take part in time, or an update does not fit.
        """
        encoded = self._encode() if self._delta and self._version != NO_VERSION else {}
        states = self._states(version, encoded)
        _require_versions(states, version)
        full_ranks = self._full_ranks(states)
        chain = states[min(rank for rank, state in states.items() if state.is_source)].chain or secrets.randbits(62)
        chain = self._agreed(chain)
        self._version = NO_VERSION  # until the update is complete
        full = replace(
            self._plan, transfers=tuple(t for t in self._plan.transfers if t.is_local or t.destination in full_ranks)
        )
        self._execute(full)
        sent, received = self._update_changes(encoded, full_ranks)
        if self._delta:
            self._remember(encoded)
        self._chain, self._version = chain, version
        return SyncReport(
            version,
            full_ranks,
            sent + full.bytes_sent(self._rank),
            received + full.bytes_received(self._rank),
            self._plan.bytes_sent(self._rank) + self._plan.bytes_received(self._rank),
        )

    def _execute(self, plan: TransferPlan) -> None:
        execute_transfer(
            plan,
            source=self._sides.source,
            destination=self._sides.destination,
            group=self._group,
            bucket_bytes=self._bucket_bytes,
            timeout=self._timeout,
        )

    def _own(self) -> list[BlockTransfer]:
        """The transfers that this rank sends to others."""
        return [each for each in self._plan.transfers if each.source == self._rank and not each.is_local]

    def _values(self, each: BlockTransfer) -> Tensor:
        dtype = torch_dtype(self._plan.destination, each.tensor)
        values = torch.empty(box_shape(each.box), dtype=dtype, device=self._sides.device)
        self._sides.read(each, values)
        return values

    def _encode(self) -> dict[tuple[str, Box], Tensor]:
        """The record of each box that this rank sends, once for all destinations."""
        records: dict[tuple[str, Box], Tensor] = {}
        for each in self._own():
            key = (each.tensor, each.box)
            if key not in records:
                records[key] = encode_changes(self._sent.get(key), self._values(each))
        return records

    def _remember(self, records: Mapping[tuple[str, Box], Tensor]) -> None:
        """Keep the values that the destinations have now."""
        for each in self._own():
            key = (each.tensor, each.box)
            if key in records and key in self._sent:
                apply_changes(records[key], 0, self._sent[key])
            else:
                self._sent[key] = self._values(each)

    def _states(self, version: int, records: Mapping[tuple[str, Box], Tensor]) -> dict[int, _State]:
        nbytes = sum(len(records[each.tensor, each.box]) for each in self._own()) if records else 0
        is_source = any(each.source == self._rank for each in self._plan.transfers)
        own = _State(self._chain, self._version, version, is_source, nbytes)
        if not dist.is_initialized():
            return {self._rank: own}
        gathered = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, own, group=self._group)
        return {rank: state for rank, state in enumerate(gathered) if rank in self._plan.ranks}

    def _full_ranks(self, states: Mapping[int, _State]) -> tuple[int, ...]:
        """The destination ranks that need all of their weights: those that do not hold the sources' last version."""
        destinations = {each.destination for each in self._plan.transfers if not each.is_local}
        sources = [state for state in states.values() if state.is_source]
        known = {(state.chain, state.version) for state in sources}
        wire_bytes = sum(state.record_bytes for state in sources)
        everything = sum(each.nbytes for each in self._plan.transfers if not each.is_local)
        if not self._delta or len(known) != 1 or (0, NO_VERSION) in known or wire_bytes >= everything:
            return tuple(sorted(destinations))
        return tuple(sorted(r for r in destinations if (states[r].chain, states[r].version) not in known))

    def _agreed(self, chain: int) -> int:
        """The chain's number that the plan's first rank chose."""
        if not dist.is_initialized():
            return chain
        numbers = [chain] * dist.get_world_size(self._group)
        dist.all_gather_object(numbers, chain, group=self._group)
        return numbers[self._plan.ranks[0]]

    def _update_changes(self, records: Mapping[tuple[str, Box], Tensor], full_ranks: Sequence[int]) -> tuple[int, int]:
        """Send differences, and apply what arrived once every rank has its own; return bytes sent and received."""
        changes = [t for t in self._plan.transfers if not t.is_local and t.destination not in full_ranks]
        if not changes:
            return 0, 0
        try:
            sent, arrived = self._exchange_changes(records, changes)
        except WeightSyncError:
            with suppress(WeightSyncError):
                self._agree(succeeded=False)
            raise
        self._agree(succeeded=True)
        for rank, run in arrived.items():
            offset = 0
            for each in changes:
                if (each.source, each.destination) == (rank, self._rank):
                    values = self._held(each)
                    offset = apply_changes(run, offset, values)
                    self._sides.write(each, values)
        return sent, sum(map(len, arrived.values()))

    def _exchange_changes(
        self, records: Mapping[tuple[str, Box], Tensor], changes: Sequence[BlockTransfer]
    ) -> tuple[int, dict[int, Tensor]]:
        """Send this rank's records; return their bytes, and the records that arrived by the rank that sent them."""
        outgoing: dict[int, list[Tensor]] = {}
        most: dict[int, int] = {}
        for each in changes:
            if each.source == self._rank:
                outgoing.setdefault(each.destination, []).append(records[each.tensor, each.box])
            if each.destination == self._rank:
                most[each.source] = most.get(each.source, 0) + each.nbytes + HEADER_BYTES
        device = self._sides.device
        messages = {rank: torch.cat(parts) for rank, parts in outgoing.items()}
        sizes = {rank: torch.tensor([len(message)], device=device) for rank, message in messages.items()}
        announced = {rank: torch.zeros(1, dtype=torch.int64, device=device) for rank in most}
        self._exchange(sizes, announced)
        arrived = {}
        for rank, size in announced.items():
            if not 0 <= int(size) <= most[rank]:
                raise WeightSyncError(f"rank {rank} announced {int(size)} bytes for blocks of {most[rank]}")
            arrived[rank] = torch.empty(int(size), dtype=torch.uint8, device=device)
        self._exchange(messages, arrived)
        return sum(map(len, messages.values())), arrived

    def _agree(self, *, succeeded: bool) -> None:
        """Return if every rank has what it waited for, so that all apply an update or none does.

        Raises:
            WeightSyncError: a rank failed, or did not answer in time.
        """
        first, *others = self._plan.ranks
        own = torch.tensor([int(succeeded)], device=self._sides.device)
        if self._rank != first:
            answer = torch.zeros_like(own)
            self._exchange({first: own}, {})
            self._exchange({}, {first: answer})
        else:
            answers = {rank: torch.zeros_like(own) for rank in others}
            try:
                self._exchange({}, answers)
                answer = torch.stack([own, *answers.values()]).amin(0)
            except WeightSyncError:
                answer = torch.zeros_like(own)
            self._exchange(dict.fromkeys(others, answer), {})
        if not int(answer):
            raise WeightSyncError(
                "an update was not applied on any rank, since one did not receive all of it; the message of that rank "
                "says why. The next update is full"
            )

    def _exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        exchange(outgoing, incoming, self._rank, self._group, self._timeout)

    def _held(self, each: BlockTransfer) -> Tensor:
        """The old values of a box at this destination, in the dtype that is sent."""
        dtype = torch_dtype(self._plan.destination, each.tensor)
        values = torch.empty(box_shape(each.box), dtype=dtype, device=self._sides.device)
        self._sides.read_back(each, values)
        return values


def _require_versions(states: Mapping[int, _State], version: int) -> None:
    for rank, state in states.items():
        if state.requested != version:
            raise OptionError(f"version is {version} on this rank and {state.requested} on rank {rank}: give the same")
    last = max((state.version for state in states.values() if state.is_source), default=NO_VERSION)
    if version <= last or version < 0:
        raise OptionError(
            f"version {version} was asked for after version {last}: updates are sent once, in order; give a larger one"
        )
