"""The monitors of one rank and of several ranks: a heartbeat thread, and a thread that ends a blocked process.

Ranks post their heartbeats in a ``torch.distributed`` store, in which rank 0 finds and announces a lost rank.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fsdp_runtime._torch_compat import clone_default_store
from fsdp_runtime.errors import FsdpRuntimeError, LostRankError, OptionError, OtherRankError

logger = logging.getLogger(__name__)

#: Exit status of a process that waits for a lost rank: EX_TEMPFAIL of sysexits.h, "try again".
_STATUS = 75
#: Heartbeats per timeout.
_ROUNDS = 10
#: Numbers of monitors, equal on every rank.
_numbers = itertools.count()
#: Seconds between rank 0's final checks that the other ranks have finished; detector rounds keep their interval.
_END_SECONDS = 0.1
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


class HeartbeatStore:
    """The keys of one monitor in a store; ``name`` is equal on every rank, and different for every monitor."""

    def __init__(self, name: str, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        # A connection serves one call at a time, and some calls wait.
        self._store, self._waiting_store = (PrefixStore(name, clone_default_store()) for _ in range(2))
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

    def latest(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """Return the latest heartbeats of ranks that have posted one."""
        texts = self._store.multi_get([f"rank/{rank}" for rank in ranks])
        return {rank: Heartbeat(**json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

    def missing(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that have posted nothing within the timeout."""
        try:
            self._store.wait([f"rank/{rank}" for rank in ranks], self._timeout)
        except RuntimeError:
            return [rank for rank in ranks if not self._store.check([f"rank/{rank}"])]
        return []

    def announce(self, lost: LostRankError) -> None:
        """Write the lost rank for all ranks."""
        self._store.set("lost", json.dumps(lost.args))

    def announced(self) -> LostRankError | None:
        """Return the lost rank that rank 0 announced, if any."""
        return LostRankError(*json.loads(self._store.get("lost"))) if self._store.check(["lost"]) else None


class FailureDetector:
    """Count the rounds in which a rank's heartbeat has not changed, per rank."""

    # Rounds are counted instead of clock seconds, so that a process that was stopped for a while does not count
    # the other ranks as lost when it continues.

    def __init__(self, interval: float, timeout: float) -> None:
        self._interval, self._timeout = interval, timeout
        self._heartbeats: dict[int, Heartbeat] = {}
        self._unchanged_rounds: dict[int, int] = {}

    def update(self, heartbeats: Mapping[int, Heartbeat]) -> LostRankError | None:
        """Process one round; return the first rank that raised, else the first that is silent for too long."""
        for rank, heartbeat in heartbeats.items():
            unchanged = rank in self._heartbeats and self._heartbeats[rank].count == heartbeat.count
            self._unchanged_rounds[rank] = self._unchanged_rounds[rank] + 1 if unchanged else 0
            self._heartbeats[rank] = heartbeat
        for rank, heartbeat in self._heartbeats.items():
            if heartbeat.state == "failed":
                return LostRankError(rank, heartbeat.phase, f"raised {heartbeat.message}")
        for rank, heartbeat in self._heartbeats.items():
            silence = self._unchanged_rounds[rank] * self._interval
            if heartbeat.state == "running" and silence > self._timeout:
                return LostRankError(rank, heartbeat.phase, no_heartbeat(silence))
        return None

    def all_finished(self) -> bool:
        """Return whether every rank has finished."""
        return all(heartbeat.state == "finished" for heartbeat in self._heartbeats.values())


def no_heartbeat(seconds: float) -> str:
    """Return the reason for a rank that is silent."""
    return f"sent no heartbeat for {seconds:.3g} s (killed, stopped or disconnected)"


class RankMonitor:
    """The running monitor of :func:`monitor_ranks`, which creates it.

    This class serves a single process: it only keeps the phase for error messages.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._phase = "start"
        self._lost: LostRankError | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name this rank's current phase for error messages, on this rank and on others.

        Args:
            name: such as ``"forward"``; the enclosing phase is current again afterwards.

        Raises:
            LostRankError: another rank is known to be lost.
        """
        if self._lost is not None:
            raise self._reported(self._lost)
        enclosing = self._phase
        self.set_phase(name)
        yield
        self.set_phase(enclosing)  # not after an error: its message has to name the inner phase

    def set_phase(self, name: str) -> None:
        """Change the current phase."""
        self._phase = name

    def finish(self) -> None:
        """Report the end of the monitored block."""

    def fail(self, error: BaseException) -> None:
        """Report an exception that leaves the monitored block; may raise another rank's failure instead."""
        if not isinstance(error, LostRankError):
            error.add_note(f"on rank {self.rank}, in phase {self._phase!r}")

    def stop(self) -> None:
        """End all threads."""

    def _reported(self, lost: LostRankError) -> LostRankError:
        reporter = f"reported by rank {self.rank} in phase {self._phase!r}"
        return LostRankError(lost.rank, lost.phase, f"{lost.reason}; {reporter}")


class DistributedMonitor(RankMonitor):
    """A monitor of all ranks of the world; a rank is lost after ``timeout`` seconds without a heartbeat."""

    def __init__(self, timeout: float) -> None:
        super().__init__(dist.get_rank())
        self._timeout, self._interval = timeout, timeout / _ROUNDS
        self._observed = range(1, dist.get_world_size()) if self.rank == 0 else range(1)
        self._store = HeartbeatStore(f"fsdp_runtime/monitor/{next(_numbers)}", timeout)
        self._detector = FailureDetector(self._interval, timeout)
        self._ending, self._stopping, self._lost_known, self._others_finished = (threading.Event() for _ in range(4))
        self._post_lock = threading.Lock()
        self._heartbeat = Heartbeat()
        self._rank0_heartbeat = Heartbeat()
        self._rounds_missed = 0
        self._post()
        if missing := self._store.missing(self._observed):
            reason = f"ranks {missing} did not start monitoring within {timeout:g} s"
            raise LostRankError(missing[0], "start", reason)
        self._threads = [
            threading.Thread(target=run, name=f"monitor_ranks {run.__name__}", daemon=True)
            for run in (self._exchange, self._exit_if_blocked)
        ]
        for thread in self._threads:
            thread.start()

    def set_phase(self, name: str) -> None:
        """Change the current phase and send it."""
        super().set_phase(name)
        self._post(phase=name)

    def finish(self) -> None:
        """Report the end; rank 0 waits for all other ranks: it observes them and may host the store."""
        self._post(state="finished")
        self._ending.set()
        while self.rank == 0 and not self._others_finished.wait(self._interval):
            if self._lost is not None:
                raise self._reported(self._lost)
        if self.rank == 0:
            self._post(state="closed")  # the threads of ranks that finished after rank 0 wait for its next heartbeat

    def fail(self, error: BaseException) -> None:
        """Report an exception of this rank, unless another rank's failure caused it."""
        if not isinstance(error, LostRankError):
            is_own = isinstance(error, FsdpRuntimeError) and not isinstance(error, OtherRankError)
            if isinstance(error, RuntimeError) and not is_own:  # another rank's end may be the cause, and known soon
                self._lost_known.wait(self._timeout + 3 * self._interval)
            if self._lost is not None:
                self._drain()
                raise self._reported(self._lost) from error
            with suppress(RuntimeError):  # the store may be gone; the exception matters more
                message = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
                self._post(state="failed", message=message)
                if self.rank == 0:
                    self._store.announce(LostRankError(0, self._phase, f"raised {message}"))
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
        if lost is not None and self._lost is None:
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
        failed = LostRankError(0, self._rank0_heartbeat.phase, f"raised {self._rank0_heartbeat.message}")
        self._record(failed if self._rank0_heartbeat.state == "failed" else self._store.announced())

    def _exit_if_blocked(self) -> None:
        """Exit if a rank is lost and the main thread does not raise; this thread never waits for another rank."""
        rounds_since_lost = 0
        while not self._stopping.wait(self._interval):
            self._rounds_missed += 1
            if self._rounds_missed > _ROUNDS:
                self._record(self._lost_rank0(no_heartbeat(self._timeout)))
            rounds_since_lost += self._lost is not None
            if self._lost is not None and rounds_since_lost > _ROUNDS // 2:
                error = self._reported(self._lost)
                logger.critical("%s; this process is blocked in a collective and exits with status %d", error, _STATUS)
                logging.shutdown()
                os._exit(_STATUS)

    def _record(self, lost: LostRankError | None) -> None:
        if lost is not None and self._lost is None:
            self._lost = lost
            self._lost_known.set()

    def _lost_rank0(self, reason: str) -> LostRankError:
        return LostRankError(0, self._rank0_heartbeat.phase if self.rank else self._phase, reason)

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
    try:
        yield monitor
        monitor.finish()
    except BaseException as error:
        monitor.fail(error)
        raise
    finally:
        monitor.stop()
