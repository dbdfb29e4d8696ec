"""Detect lost ranks from their heartbeats."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_runtime.monitor.heartbeat import Heartbeat, LostRank


class FailureDetector:
    """Count for how many rounds each rank's heartbeat has not changed.

    Rounds are counted instead of clock seconds, so that a process that was itself stopped for a while does not take the
    others for dead when it continues.
    """

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
