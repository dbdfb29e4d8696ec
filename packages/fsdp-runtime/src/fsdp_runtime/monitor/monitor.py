"""The watch itself: two threads beside the training loop, and what becomes of it when a rank is lost."""

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

from fsdp_runtime._torch_compat import own_store
from fsdp_runtime.errors import FsdpRuntimeError, LostRankError, OptionError
from fsdp_runtime.monitor.failure_detector import Lookout
from fsdp_runtime.monitor.heartbeat import Board, Finding, Sign

logger = logging.getLogger(__name__)

#: The exit status of a process that is ended because it waits for a lost rank: sysexits' EX_TEMPFAIL, "try again".
LOST_RANK_STATUS = 75
#: Rounds of signs within the time-out.
_ROUNDS = 10
#: Watches are numbered, alike on every rank.
_numbers = itertools.count()


@contextmanager
def watch_ranks(*, timeout: float = 60.0) -> Iterator[Watch]:
    """End this rank within a bound, with the name of the guilty rank and its phase, when another one is lost.

    A rank is lost when its process is killed, stops or is cut off for ``timeout`` seconds, or when it raises inside
    the watch.  Every other rank then ends within twice ``timeout``: with :class:`LostRankError` where its collective
    fails (gloo's do when a peer dies), and otherwise, as no thread can be called back from a collective that waits for
    ever, by ending the process with status 75 after the same message was logged.  An error that this rank raises
    itself is told to the others and passes through, with a note that names rank and phase.

    ``RuntimeError`` may be the echo of another rank's end, so it is held back until all others have shown, for
    ``timeout``, that they are alive.  Collective over the world; rank 0 leaves last.  A single process is not watched.

    Args:
        timeout: seconds.  Signs of life go out from a thread of their own, ten times within it, whatever the main
            thread waits for; only code that keeps Python's lock for that long would be taken for dead.

    Yields:
        The watch, for its :meth:`Watch.phase`.

    Raises:
        LostRankError: another rank is lost.
        OptionError: the time-out is no positive number.

    The store of ``init_process_group`` carries the signs: one small message a rank and round, and one for each
    phase.  Rank 0 reads all of them and announces what it finds; the others follow rank 0.
    """
    if not timeout > 0:
        raise OptionError(f"timeout={timeout}: give seconds above 0")
    watch = Watch(timeout) if dist.is_initialized() and dist.get_world_size() > 1 else Watch(None)
    watch._start()
    try:
        yield watch
        watch._leave()
    except BaseException as error:
        watch._fail(error)
        raise
    finally:
        watch._stop()


class Watch:
    """The running watch of :func:`watch_ranks`; made there only."""

    def __init__(self, timeout: float | None) -> None:
        self._threads: list[threading.Thread] = []
        self._stopped, self._found, self._alone = threading.Event(), threading.Event(), threading.Event()
        self._posting = threading.Lock()
        self._sign, self._first = Sign(), Sign()
        self._finding: Finding | None = None
        self._rounds_missed = 0
        self.rank, self._watching = 0, timeout is not None
        if timeout is not None:
            self.rank = dist.get_rank()
            self._timeout, self._interval = timeout, timeout / _ROUNDS
            self._others = range(1, dist.get_world_size()) if self.rank == 0 else range(1)
            self._board = Board(own_store, f"fsdp_runtime/watch/{next(_numbers)}", timeout)
            self._lookout = Lookout(self._interval, timeout)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what this rank is doing, for the others' messages.

        Args:
            name: as ``"forward"``; the phase around it is in force again afterwards.

        Raises:
            LostRankError: another rank is known to be lost.
        """
        if self._found.is_set():
            raise self._lost()
        outer = self._sign.phase
        self._post(phase=name)
        yield
        self._post(phase=outer)  # not after an error: then the phase is what the message has to name

    def _start(self) -> None:
        if not self._watching:
            return
        self._post()
        if absent := self._board.absent(self._others):
            raise LostRankError(absent[0], "start", f"ranks {absent} did not begin to watch within {self._timeout:g} s")
        for run in (self._exchange, self._guard):
            self._threads.append(threading.Thread(target=run, name=f"watch_ranks {run.__name__}", daemon=True))
            self._threads[-1].start()

    def _post(self, **changed: Any) -> None:
        with self._posting:
            self._sign = replace(self._sign, beat=self._sign.beat + 1, **changed)
            if self._watching:
                self._board.post(self.rank, self._sign)

    def _look(self) -> None:
        """Rank 0: read everyone's signs, and announce what they tell."""
        finding = self._lookout.look(self._board.signs(self._others))
        if finding is not None and not self._found.is_set():
            self._board.announce(finding)
            self._post()  # wakes the others
        self._conclude(finding)
        if self._lookout.all_left():
            self._alone.set()
        self._stopped.wait(self._interval)

    def _follow(self) -> None:
        """Any other rank: wait for rank 0's next sign, and read what it announced."""
        self._first = self._board.follow(self._first.beat, 2 * self._timeout)
        failed = Finding(0, self._first.phase, f"raised {self._first.message}")
        self._conclude(failed if self._first.state == "failed" else self._board.announced())

    def _exchange(self) -> None:
        """Give signs of life, and look at the others; this thread may get stuck in the store."""
        posted = time.monotonic()
        while not self._stopped.is_set():
            try:
                if time.monotonic() - posted >= 0.9 * self._interval:
                    self._post()
                    posted = time.monotonic()
                if self.rank == 0:
                    self._look()
                else:
                    self._follow()
            except RuntimeError as error:
                self._conclude(self._lost_first(f"took the ranks' store with it ({str(error).splitlines()[0]})"))
                return
            self._rounds_missed = 0

    def _guard(self) -> None:
        """End the process if the main thread does not; this thread never waits for anybody."""
        rounds_since = 0
        while not self._stopped.wait(self._interval):
            self._rounds_missed += 1
            if self._rounds_missed > _ROUNDS:
                self._conclude(
                    self._lost_first(f"gave no sign of life for {self._timeout:g} s (killed, stopped, cut off)")
                )
            rounds_since = rounds_since + 1 if self._found.is_set() else 0
            if rounds_since > _ROUNDS // 2:
                logger.critical(
                    "%s; this process waits for it in a collective, and is ended with status %d",
                    self._lost(),
                    LOST_RANK_STATUS,
                )
                logging.shutdown()
                os._exit(LOST_RANK_STATUS)

    def _conclude(self, finding: Finding | None) -> None:
        if finding is not None and not self._found.is_set():
            self._finding = finding
            self._found.set()

    def _lost_first(self, what: str) -> Finding:
        return Finding(0, self._first.phase if self.rank else self._sign.phase, what)

    def _lost(self) -> LostRankError:
        finding = self._finding or Finding(self.rank, self._sign.phase, "failed")
        here = f"rank {self.rank}, which says this, was in phase {self._sign.phase!r}"
        return LostRankError(finding.rank, finding.phase, f"{finding.what}; {here}")

    def _leave(self) -> None:
        """Rank 0 stays to the end: it watches for all, and its process may hold the store."""
        if not self._watching:
            return
        self._post(state="left")
        while self.rank == 0 and not self._alone.wait(self._interval):
            if self._found.is_set():
                raise self._lost()

    def _fail(self, error: BaseException) -> None:
        """Tell the others, unless the error is another rank's doing.

        Raises:
            LostRankError: it is.
        """
        if self._watching and not isinstance(error, LostRankError):
            if isinstance(error, RuntimeError) and not isinstance(error, FsdpRuntimeError):
                self._found.wait(self._timeout + 3 * self._interval)
            if self._found.is_set():
                self._linger()
                raise self._lost() from error
            with suppress(RuntimeError):  # the store may be gone by now, and the error matters more
                message = f"{type(error).__name__}: {error}"
                self._post(state="failed", message=message)
                if self.rank == 0:
                    self._board.announce(Finding(0, self._sign.phase, f"raised {message}"))
        if not isinstance(error, LostRankError):
            error.add_note(f"on rank {self.rank}, in phase {self._sign.phase!r}")
        self._linger()

    def _linger(self) -> None:
        """Give the others time to read what was announced, if the store may end with this process."""
        if self._watching and self.rank == 0:
            time.sleep(3 * self._interval)

    def _stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=3 * self._interval)
