"""The monitors of one rank and of several ranks: a heartbeat thread, and a thread that ends a blocked process."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from fsdp_runtime._torch_compat import clone_default_store
from fsdp_runtime.errors import FsdpRuntimeError, LostRankError, OptionError, OtherRankError
from fsdp_runtime.monitor.heartbeat import FailureDetector, Heartbeat, HeartbeatStore, LostRank, no_heartbeat

logger = logging.getLogger(__name__)

#: Exit status of a process that waits for a lost rank: EX_TEMPFAIL of sysexits.h, "try again".
LOST_RANK_STATUS = 75
#: Heartbeats per timeout.
_ROUNDS = 10
#: Numbers of monitors, equal on every rank.
_numbers = itertools.count()

#: Seconds between rank 0's final checks that the other ranks have finished; detector rounds keep their interval.
_END_SECONDS = 0.1


class RankMonitor:
    """The running monitor of :func:`monitor_ranks`, which creates it.

    This class serves a single process: it only keeps the phase for error messages.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._phase = "start"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name this rank's current phase for error messages, on this rank and on others.

        Args:
            name: such as ``"forward"``; the enclosing phase is current again afterwards.

        Raises:
            LostRankError: another rank is known to be lost.
        """
        enclosing = self._phase
        self.set_phase(name)
        yield
        self.set_phase(enclosing)  # not after an error: its message has to name the inner phase

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


class DistributedMonitor(RankMonitor):
    """A monitor of all ranks of the world; a rank is lost after ``timeout`` seconds without a heartbeat."""

    def __init__(self, timeout: float) -> None:
        super().__init__(dist.get_rank())
        self._timeout, self._interval = timeout, timeout / _ROUNDS
        self._observed = range(1, dist.get_world_size()) if self.rank == 0 else range(1)
        self._store = HeartbeatStore(clone_default_store, f"fsdp_runtime/monitor/{next(_numbers)}", timeout)
        self._detector = FailureDetector(self._interval, timeout)
        self._threads: list[threading.Thread] = []
        self._ending, self._stopping, self._lost_known, self._others_finished = (threading.Event() for _ in range(4))
        self._post_lock = threading.Lock()
        self._heartbeat = Heartbeat()
        self._rank0_heartbeat = Heartbeat()
        self._lost: LostRank | None = None
        self._rounds_missed = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name this rank's current phase; raises :class:`LostRankError` if another rank is known to be lost."""
        if self._lost_known.is_set():
            raise self._error()
        with super().phase(name):
            yield

    def set_phase(self, name: str) -> None:
        """Change the current phase and send it."""
        super().set_phase(name)
        self._post(phase=name)

    def start(self) -> None:
        """Wait until all observed ranks have sent a heartbeat, and start the threads."""
        self._post()
        if missing := self._store.missing(self._observed):
            reason = f"ranks {missing} did not start monitoring within {self._timeout:g} s"
            raise LostRankError(missing[0], "start", reason)
        for run in (self._exchange, self._exit_if_blocked):
            self._threads.append(threading.Thread(target=run, name=f"monitor_ranks {run.__name__}", daemon=True))
            self._threads[-1].start()

    def finish(self) -> None:
        """Report the end; rank 0 waits for all other ranks: it observes them and may host the store."""
        self._post(state="finished")
        self._ending.set()
        while self.rank == 0 and not self._others_finished.wait(self._interval):
            if self._lost_known.is_set():
                raise self._error()
        if self.rank == 0:
            self._post(state="closed")  # the threads of ranks that finished after rank 0 wait for its next heartbeat

    def fail(self, error: BaseException) -> None:
        """Report an exception of this rank, unless another rank's failure caused it."""
        if not isinstance(error, LostRankError):
            is_own = isinstance(error, FsdpRuntimeError) and not isinstance(error, OtherRankError)
            if isinstance(error, RuntimeError) and not is_own:  # another rank's end may be the cause, and known soon
                self._lost_known.wait(self._timeout + 3 * self._interval)
            if self._lost_known.is_set():
                self._drain()
                raise self._error() from error
            with suppress(RuntimeError):  # the store may be gone; the exception matters more
                message = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
                self._post(state="failed", message=message)
                if self.rank == 0:
                    self._store.announce(LostRank(0, self._phase, f"raised {message}"))
        super().fail(error)
        self._drain()

    def stop(self) -> None:
        """End the threads."""
        self._stopping.set()
        self._ending.set()
        for thread in self._threads:
            thread.join(timeout=3 * self._interval)

    def _post(self, **changes: Any) -> None:
        with self._post_lock:
            self._heartbeat = replace(self._heartbeat, count=self._heartbeat.count + 1, **changes)
            self._store.post(self.rank, self._heartbeat)

    def _exchange(self) -> None:
        """Send and read heartbeats until stopped; this thread may block in the store."""
        posted = time.monotonic()
        while not self._stopping.is_set() and self._rank0_heartbeat.state != "closed":
            try:
                if time.monotonic() - posted >= 0.9 * self._interval:
                    self._post()
                    posted = time.monotonic()
                if self.rank == 0:
                    self._poll_all()
                else:
                    self._wait_for_rank0()
            except RuntimeError as error:
                self._record(self._lost_rank0(f"ended and its store with it ({str(error).splitlines()[0]})"))
                return
            self._rounds_missed = 0

    def _poll_all(self) -> None:
        """On rank 0: read all heartbeats and announce a lost rank."""
        lost = self._detector.update(self._store.latest(self._observed))
        if lost is not None and not self._lost_known.is_set():
            self._store.announce(lost)
            self._post()  # wakes the other ranks
        self._record(lost)
        if self._detector.all_finished():
            self._others_finished.set()
        next_round = time.monotonic() + self._interval
        if self._ending.wait(self._interval):
            while not self._stopping.wait(min(_END_SECONDS, self._interval)) and time.monotonic() < next_round:
                if all(beat.state == "finished" for beat in self._store.latest(self._observed).values()):
                    self._others_finished.set()

    def _wait_for_rank0(self) -> None:
        """On the other ranks: wait for rank 0's next heartbeat and read its announcement."""
        self._rank0_heartbeat = self._store.wait_for_rank0(self._rank0_heartbeat.count, 2 * self._timeout)
        failed = LostRank(0, self._rank0_heartbeat.phase, f"raised {self._rank0_heartbeat.message}")
        self._record(failed if self._rank0_heartbeat.state == "failed" else self._store.announced())

    def _exit_if_blocked(self) -> None:
        """Exit if a rank is lost and the main thread does not raise; this thread never waits for another rank."""
        rounds_since_lost = 0
        while not self._stopping.wait(self._interval):
            self._rounds_missed += 1
            if self._rounds_missed > _ROUNDS:
                self._record(self._lost_rank0(no_heartbeat(self._timeout)))
            rounds_since_lost = rounds_since_lost + 1 if self._lost_known.is_set() else 0
            if rounds_since_lost > _ROUNDS // 2:
                logger.critical(
                    "%s; this process is blocked in a collective and exits with status %d",
                    self._error(),
                    LOST_RANK_STATUS,
                )
                logging.shutdown()
                os._exit(LOST_RANK_STATUS)

    def _record(self, lost: LostRank | None) -> None:
        if lost is not None and not self._lost_known.is_set():
            self._lost = lost
            self._lost_known.set()

    def _lost_rank0(self, reason: str) -> LostRank:
        return LostRank(0, self._rank0_heartbeat.phase if self.rank else self._phase, reason)

    def _error(self) -> LostRankError:
        lost = self._lost or LostRank(self.rank, self._phase, "failed")
        return LostRankError(
            lost.rank, lost.phase, f"{lost.reason}; reported by rank {self.rank} in phase {self._phase!r}"
        )

    def _drain(self) -> None:
        """On rank 0: give other ranks time to read the announcement, because the store may end with this process."""
        if self.rank == 0:
            time.sleep(3 * self._interval)


@contextmanager
def monitor_ranks(*, timeout: float = 60.0) -> Iterator[RankMonitor]:
    """End this rank within a bounded time if another rank is lost, and name that rank and its phase.

    A rank is lost if its process is killed, stopped or disconnected for ``timeout`` seconds, or if it raises inside the
    block.  Every other rank then ends within twice ``timeout``: with :class:`LostRankError` if its collective fails, as
    gloo's collectives do when a peer dies.  A thread blocked in a collective cannot be interrupted, so otherwise the
    process logs the same message and exits with status 75.  An exception of this rank is reported to the other ranks
    and passes through, with a note that names rank and phase.

    A ``RuntimeError`` of torch or of the user, or an :class:`OtherRankError`, may be the consequence of another rank's
    failure, so it is delayed until all other ranks have sent heartbeats for ``timeout``.  Collective over the world;
    rank 0 leaves last.  A single process is not monitored.

    Args:
        timeout: seconds.  A thread sends ten heartbeats in this time, also while the main thread waits; only a
            rank that holds Python's global interpreter lock for that long would count as lost.

    Raises:
        LostRankError: another rank is lost.
        OptionError: the timeout is not positive.

    Example:
        >>> from fsdp_runtime.monitor import monitor_ranks
        >>> with monitor_ranks(timeout=60) as monitor:
        ...     with monitor.phase("forward"):
        ...         pass
    """
    if not timeout > 0:
        raise OptionError(f"timeout={timeout}: give seconds above 0")
    alone = not dist.is_initialized() or dist.get_world_size() < 2
    monitor = RankMonitor() if alone else DistributedMonitor(timeout)
    monitor.start()
    try:
        yield monitor
        monitor.finish()
    except BaseException as error:
        monitor.fail(error)
        raise
    finally:
        monitor.stop()
