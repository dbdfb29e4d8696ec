"""Judging other ranks by their signs of life."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_runtime.monitor.heartbeat import Finding, Sign


class Lookout:
    """Remembers for how many rounds a rank's sign has stayed the same.

    Rounds are counted, and not seconds of any clock, so that a process that was itself stopped for a while does not
    take the others for dead when it goes on.

    Args:
        interval: seconds from round to round.
        timeout: seconds without a new sign after which a rank counts as lost.
    """

    def __init__(self, interval: float, timeout: float) -> None:
        self._interval, self._timeout = interval, timeout
        self._signs: dict[int, Sign] = {}
        self._rounds: dict[int, int] = {}

    def look(self, signs: Mapping[int, Sign]) -> Finding | None:
        """Take in one round of signs; the first rank found to have raised, or else to be silent for too long."""
        for rank, sign in signs.items():
            same = rank in self._signs and self._signs[rank].beat == sign.beat
            self._rounds[rank] = self._rounds[rank] + 1 if same else 0
            self._signs[rank] = sign
        for rank, sign in self._signs.items():
            if sign.state == "failed":
                return Finding(rank, sign.phase, f"raised {sign.message}")
        for rank, sign in self._signs.items():
            silence = self._rounds[rank] * self._interval
            if sign.state == "running" and silence > self._timeout:
                return Finding(rank, sign.phase, f"gave no sign of life for {silence:.3g} s (killed, stopped, cut off)")
        return None

    def all_left(self) -> bool:
        """Whether every rank looked at is done."""
        return all(sign.state == "left" for sign in self._signs.values())
