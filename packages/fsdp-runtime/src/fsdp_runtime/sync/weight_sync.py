"""Repeated transfers, one per version: all weights first, then only changed elements."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import OptionError, WeightSyncError
from fsdp_runtime.sync.deltas import ArrivedChanges, Changes
from fsdp_runtime.sync.execute import Sides, box_views, rounds_of, run_rounds, split_transfers, windows_of
from fsdp_runtime.sync.groups import DEFAULT_TIMEOUT, Handshake, PointToPoint, rank_in
from fsdp_runtime.sync.model_layout import ModelShards
from fsdp_runtime.weights import DEFAULT_BUCKET_BYTES
from tp_plans.boxes import Box
from tp_plans.transfer import TransferPlan

#: Version of a rank without weights of this source: only a full update fits.
NO_VERSION = -1


@dataclass(frozen=True)
class SyncReport:
    """Result of one update on this rank."""

    version: int  # the version that the destination ranks now hold
    full_ranks: tuple[int, ...]  # the destination ranks that received all of their weights
    bytes_sent: int  # bytes that this rank sent
    bytes_received: int  # bytes that this rank received
    bytes_full: int  # bytes that this rank would have sent and received in a full update


class _State(NamedTuple):
    """A rank's state before an update, in numbers."""

    plan: int
    chain: int
    version: int
    requested: int
    is_source: int
    record_bytes: int
    proposal: int
    windows: int


class WeightSync:
    """Updates of a destination's weights from a source, one per training step.

    The first update sends all weights.  Later updates send a difference to the last version: the elements with changed
    bits, in the dtype of the messages.  Each destination rank that holds the last version receives the difference; any
    other rank, restarted or new, receives all of its weights.  If the differences of an update are not smaller than
    full weights, all ranks receive full weights.

    An update is applied once every rank has received its weights.  Until then destinations hold their last version;
    after a failure they keep it, and the next update is full.  Full weights wait on the host meanwhile; with
    ``staged=False`` they are written on arrival, and a failure leaves a destination without a version.  Build the
    object on every rank of the plan; each source rank keeps a copy of its sent values, in the dtype of the messages.

    Args:
        plan: the same on every rank.
        source: this rank's local tensors, if it sends, or their :class:`ModelShards`; each update refreshes these.
        destination: this rank's local tensors, if it receives.
        group: the process group of the plan's ranks; ``None`` for the world.
        bucket_bytes: the bucket of full updates; see :func:`execute_transfer`.
        timeout: see :func:`execute_transfer`.
        delta: send differences; ``False`` sends full weights always and keeps no copy.
        staged: keep full weights on the host until all have arrived, which takes as much host memory as a destination
            rank stores; ``False`` takes one bucket, and the engine must not serve during a full update.

    Raises:
        WeightSyncError: a local tensor is missing, too small, or of a dtype that cannot hold the sent values.

    Example:
        >>> import torch, tp_plans
        >>> from fsdp_runtime.sync import ModelShards, WeightSync
        >>> trained, engine = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        >>> shards, target = ModelShards(trained), ModelShards(engine)
        >>> plan = tp_plans.transfer.plan_transfer(shards.layout, target.layout)
        >>> sync = WeightSync(plan, source=shards, destination=target.local)
        >>> sync.update(1).version
        1
        >>> torch.equal(trained.weight, engine.weight)
        True
    """

    def __init__(
        self,
        plan: TransferPlan,
        *,
        source: Mapping[str, Tensor] | ModelShards | None = None,
        destination: Mapping[str, Tensor] | None = None,
        group: ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: timedelta = DEFAULT_TIMEOUT,
        delta: bool = True,
        staged: bool = True,
    ) -> None:
        self._plan, self._group = plan, group
        self._bucket_bytes, self._timeout = bucket_bytes, timeout
        self._delta, self._staged = delta, staged
        self._rank = rank_in(group)
        self._shards = source if isinstance(source, ModelShards) else None
        tensors = source.storage if isinstance(source, ModelShards) else source or {}
        self._sides = Sides(plan, self._rank, tensors, destination or {})
        self._sides.require_tensors()
        peers = PointToPoint(self._rank, group, timeout)
        self._handshake = Handshake(plan.ranks or (self._rank,), peers, self._sides.device)
        self._fingerprint = plan.fingerprint()
        self._receivers = [rank for rank in plan.receivers if plan.bytes_received(rank)]  # of weights of other ranks
        self._chain, self._version, self._is_broken = 0, NO_VERSION, False
        self._changes, self._peers = Changes(self._sides, peers), peers
        direct = [plan.for_rank(self._rank, direct=True)] if plan.relay else []  # if only some ranks receive in full
        self._windows = max(
            windows_of(plan, split_transfers(plan, transfers, bucket_bytes), bucket_bytes)
            for transfers in (self._sides.transfers, *direct)
        )

    @property
    def version(self) -> int:
        """The last version that this rank completed, also after a failure; -1 for none."""
        return self._version

    def versions(self) -> dict[int, int]:
        """Read back the version of each destination rank, on every rank.  Collective over the plan's ranks.

        A rank without a version of this source, such as a restarted rank, has -1.  :class:`WeightSyncError` is raised
        if a rank does not take part in time.
        """
        states = self._states(self._version, {}, self._chain)
        chains = {state.chain for state in states.values() if state.is_source} - {0}
        held = {rank: states[rank] for rank in self._plan.receivers}
        return {rank: state.version if state.chain in chains else NO_VERSION for rank, state in held.items()}

    @torch.no_grad()
    def update(self, version: int) -> SyncReport:
        """Update the destination to the source's current weights.  Collective over the plan's ranks.

        Args:
            version: the number of the new version, larger than the last; the same on every rank.

        Raises:
            OptionError: ``version`` differs between ranks or is not larger than the last version.  The error is the
                same on every rank, and no weight has changed.
            WeightSyncError: ranks have different plans, such as for engines of different sizes; another rank did not
                take part in time; or an update does not fit.
        """
        if self._shards is not None:
            self._shards.refresh()
        held = 0 if self._is_broken else self._chain
        records = self._changes.encode() if self._delta and held else {}
        states = self._states(version, records, held)
        _require_versions(states, version)
        full_ranks = self._full_ranks(states)
        first = min(states)
        chain = max((s.chain for s in states.values() if s.is_source), default=0) or states[first].proposal
        self._is_broken = True  # until the update completes; after a failure the next update is full
        full, changes = self._parts(full_ranks)
        with self._handshake.agreement():  # if a rank cannot stage, all ranks raise before a message is sent
            target = self._stage(full) if self._staged else self._sides.destination
        if not self._staged and self._rank in full_ranks:
            self._version = NO_VERSION  # until the update is complete
        with self._handshake.agreement():
            self._receive(full, target, max(state.windows for state in states.values()))
            differences = self._changes.exchange(records, changes.transfers)
        self._version = NO_VERSION
        self._apply(full, target, differences)
        if self._delta:
            self._changes.remember(records)
        self._chain, self._version, self._is_broken = chain, version, False
        return SyncReport(
            version,
            full_ranks,
            differences.bytes_sent + full.bytes_sent(self._rank),
            differences.bytes_received + full.bytes_received(self._rank),
            self._plan.bytes_sent(self._rank) + self._plan.bytes_received(self._rank),
        )

    def _parts(self, full_ranks: Sequence[int]) -> tuple[TransferPlan, TransferPlan]:
        """This rank's transfers with other ranks: transfers of full weights, and transfers of differences."""
        # Ranks relay received data. If some ranks receive full weights and other ranks differences, no rank relays: all
        # ranks receive from the source ranks.
        are_mixed = 0 < len(full_ranks) < len(self._receivers)
        transfers = self._plan.for_rank(self._rank, direct=True) if are_mixed else self._sides.transfers
        remote = [transfer for transfer in transfers if not transfer.is_local]
        full = self._plan.part(transfer for transfer in remote if transfer.destination in full_ranks)
        return full, self._plan.part(transfer for transfer in remote if transfer.destination not in full_ranks)

    def _stage(self, full: TransferPlan) -> dict[str, Tensor]:
        """Host tensors for the full weights that this rank receives."""
        names = {
            block.local
            for transfer in full.transfers
            if transfer.destination == self._rank
            for _, block in full.destination.within(self._rank, transfer.tensor, transfer.box)
        }
        return {name: torch.empty_like(self._sides.destination[name], device="cpu") for name in names}

    def _receive(self, full: TransferPlan, target: Mapping[str, Tensor], windows: int) -> None:
        sides = Sides(full, self._rank, self._sides.source, target)
        sides.require_tensors()
        rounds = rounds_of(full, split_transfers(full, sides.transfers, self._bucket_bytes), windows)
        run_rounds(sides, rounds, self._peers, self._sides.device)

    def _apply(self, full: TransferPlan, arrived: Mapping[str, Tensor], differences: ArrivedChanges) -> None:
        """Write received weights, and this rank's local copies, to the destination."""
        for each in split_transfers(self._plan, self._sides.transfers, self._bucket_bytes):
            if each.is_local:
                self._sides.write(each, self._sides.read(each))
        for each in full.transfers if self._staged else ():
            if each.destination == self._rank:
                staged = box_views(self._plan.destination, self._rank, arrived, each.tensor, each.box)
                final = box_views(self._plan.destination, self._rank, self._sides.destination, each.tensor, each.box)
                for (_, values), (_, view) in zip(staged, final, strict=True):
                    view.copy_(values)
        self._changes.apply(differences.records)

    def _states(self, version: int, records: Mapping[tuple[str, Box], Tensor], chain: int) -> dict[int, _State]:
        """Gather the states of all ranks, and check that all have the same plan."""
        nbytes = sum(len(records[each.tensor, each.box]) for each in self._changes.own()) if records else 0
        is_source = any(each.source == self._rank and not each.is_relay for each in self._sides.transfers)
        proposal = secrets.randbits(62) + 1
        own = _State(self._fingerprint, chain, self._version, version, is_source, nbytes, proposal, self._windows)
        states = {rank: _State(*numbers) for rank, numbers in self._handshake.gather(own).items()}
        others = [rank for rank, state in states.items() if state.plan != states[self._plan.ranks[0]].plan]
        if others:
            raise WeightSyncError(
                f"ranks {', '.join(map(str, others))} were built for another plan than rank {self._plan.ranks[0]}: "
                "their layouts differ, as the layouts of an engine with another tp do. Nothing was sent; plan from the "
                "same layouts on every rank"
            )
        return states

    def _full_ranks(self, states: Mapping[int, _State]) -> tuple[int, ...]:
        """The destination ranks without the sources' last version: they need full weights."""
        sources = [state for state in states.values() if state.is_source]
        known = {(state.chain, state.version) for state in sources}
        wire_bytes = sum(state.record_bytes for state in sources)
        is_known = self._delta and len(known) == 1 and all(chain for chain, _ in known)
        if not is_known or wire_bytes >= self._plan.bytes_wanted:
            return tuple(self._receivers)
        return tuple(rank for rank in self._receivers if (states[rank].chain, states[rank].version) not in known)


def _require_versions(states: Mapping[int, _State], version: int) -> None:
    for rank, state in states.items():
        if state.requested != version:
            raise OptionError(f"version is {version} on this rank and {state.requested} on rank {rank}: give the same")
    last = max((state.version for state in states.values() if state.is_source), default=NO_VERSION)
    if version <= last or version < 0:
        raise OptionError(
            f"version {version} was requested after version {last}: updates are sent once, in order; give a larger one"
        )
