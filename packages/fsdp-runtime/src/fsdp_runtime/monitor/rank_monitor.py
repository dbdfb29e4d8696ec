"""The monitor of a single process, which has no other ranks to observe, and the base of that of several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_runtime.errors import LostRankError


class RankMonitor:
    """The running monitor of :func:`monitor_ranks`, which creates it.

    This class serves a single process: it only keeps the phase for error messages.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._phase = "start"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name this rank's current phase for error messages, on this rank and on others.

        Args:
            name: such as ``"forward"``; the enclosing phase is current again afterwards.

        Yields:
            Nothing.

        Raises:
            LostRankError: another rank is known to be lost.

        Example:
            >>> from fsdp_runtime.monitor import monitor_ranks
            >>> with monitor_ranks() as monitor:
            ...     with monitor.phase("forward"):
            ...         pass
        """
        enclosing = self._phase
        self.set_phase(name)
        yield
        self.set_phase(enclosing)  # not after an error, whose message has to name the inner phase

    def set_phase(self, name: str) -> None:
        """Change the current phase."""
        self._phase = name

    def start(self) -> None:
        """Begin to send and to observe heartbeats."""

    def finish(self) -> None:
        """Report the end of the monitored block."""

    def fail(self, error: BaseException) -> None:
        """Report an exception that leaves the monitored block; may raise another rank's failure instead."""
        if not isinstance(error, LostRankError):
            error.add_note(f"on rank {self.rank}, in phase {self._phase!r}")

    def stop(self) -> None:
        """End all threads."""
