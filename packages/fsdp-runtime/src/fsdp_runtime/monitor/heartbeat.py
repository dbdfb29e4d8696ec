"""Heartbeats of the ranks in a ``torch.distributed`` store, and the detection of lost ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal

from torch.distributed.distributed_c10d import PrefixStore, Store

#: Tick keys of rank 0 that stay in the store for lagging ranks.
_KEPT_TICKS = 64


@dataclass(frozen=True)
class Heartbeat:
    """A rank's last message."""

    count: int = 0  # increases as long as the process runs
    phase: str = "start"  # the rank's current phase, as named by the user
    # ``"finished"`` after the monitored block, ``"failed"`` after an exception; rank 0 sends ``"closed"`` when all
    # ranks have finished, and nothing after it
    state: Literal["running", "finished", "failed", "closed"] = "running"
    message: str = ""


@dataclass(frozen=True)
class LostRank:
    """A rank that is lost: its number, its last phase, and the reason as a verb phrase."""

    rank: int
    phase: str
    reason: str


class HeartbeatStore:
    """The keys of one monitor in a store; ``name`` is equal on every rank, and different for every monitor."""

    # A connection of ``connect`` serves one call at a time, and some calls wait.

    def __init__(self, connect: Callable[[], Store], name: str, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._store, self._waiting_store = PrefixStore(name, connect()), PrefixStore(name, connect())
        self._store.set_timeout(self._timeout)

    def post(self, rank: int, heartbeat: Heartbeat) -> None:
        """Write a rank's heartbeat; rank 0's wakes the ranks in :meth:`wait_for_rank0`."""
        self._store.set(f"rank/{rank}", json.dumps(asdict(heartbeat)))
        if rank == 0:
            self._store.set(f"tick/{heartbeat.count}", "")
            if heartbeat.count >= _KEPT_TICKS:
                self._store.delete_key(f"tick/{heartbeat.count - _KEPT_TICKS}")

    def wait_for_rank0(self, count: int, timeout: float) -> Heartbeat:
        """Wait for rank 0's first heartbeat after ``count`` and return its latest."""
        # The call returns as soon as the heartbeat is posted, so that rank 0's last message is known before its process
        # ends, and the store with it.
        self._waiting_store.wait([f"tick/{count + 1}"], timedelta(seconds=timeout))
        return Heartbeat(**json.loads(self._waiting_store.get("rank/0")))

    def latest(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """Return the latest heartbeats of ranks that have posted one."""
        numbers = list(ranks)
        texts = self._store.multi_get([f"rank/{rank}" for rank in numbers])
        return {rank: Heartbeat(**json.loads(text)) for rank, text in zip(numbers, texts, strict=True)}

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have posted nothing within the timeout."""
        numbers = list(ranks)
        try:
            self._store.wait([f"rank/{rank}" for rank in numbers], self._timeout)
        except RuntimeError:
            return [rank for rank in numbers if not self._store.check([f"rank/{rank}"])]
        return []

    def announce(self, lost: LostRank) -> None:
        """Write the lost rank for all ranks."""
        self._store.set("lost", json.dumps(asdict(lost)))

    def announced(self) -> LostRank | None:
        """Return the lost rank that rank 0 announced, if any."""
        if not self._store.check(["lost"]):
            return None
        return LostRank(**json.loads(self._store.get("lost")))


class FailureDetector:
    """Count the rounds in which a rank's heartbeat has not changed, per rank."""

    # Rounds are counted instead of clock seconds, so that a process that was stopped for a while does not count
    # the other ranks as lost when it continues.

    def __init__(self, interval: float, timeout: float) -> None:
        self._interval, self._timeout = interval, timeout
        self._heartbeats: dict[int, Heartbeat] = {}
        self._unchanged_rounds: dict[int, int] = {}

    def update(self, heartbeats: Mapping[int, Heartbeat]) -> LostRank | None:
        """Process one round; return the first rank that raised, else the first that is silent for too long."""
        for rank, heartbeat in heartbeats.items():
            unchanged = rank in self._heartbeats and self._heartbeats[rank].count == heartbeat.count
            self._unchanged_rounds[rank] = self._unchanged_rounds[rank] + 1 if unchanged else 0
            self._heartbeats[rank] = heartbeat
        for rank, heartbeat in self._heartbeats.items():
            if heartbeat.state == "failed":
                return LostRank(rank, heartbeat.phase, f"raised {heartbeat.message}")
        for rank, heartbeat in self._heartbeats.items():
            silence = self._unchanged_rounds[rank] * self._interval
            if heartbeat.state == "running" and silence > self._timeout:
                return LostRank(rank, heartbeat.phase, no_heartbeat(silence))
        return None

    def all_finished(self) -> bool:
        """Return whether every rank has finished."""
        return all(heartbeat.state == "finished" for heartbeat in self._heartbeats.values())


def no_heartbeat(seconds: float) -> str:
    """Return the reason for a rank that is silent."""
    return f"sent no heartbeat for {seconds:.3g} s (killed, stopped or disconnected)"
