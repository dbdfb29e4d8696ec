"""Asynchronous saves in a thread: their futures and process groups, at most one save at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Generic, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp_runtime._torch_compat import local_group
from fsdp_runtime.sharded.collectives import ModelRanks

T = TypeVar("T")
#: Longest wait for the other ranks' writes; the exit of another rank's process is noticed at once.
_TIMEOUT = timedelta(hours=1)

#: Error text for the removed option ``if_saving``.
SAVES_WAIT = "a save waits until the earlier save of its process has ended; ask done() of its SaveFuture"

logger = logging.getLogger(__name__)
_running: list[SaveFuture[object]] = []
_groups: dict[tuple[int, ...], tuple[ProcessGroup | None, ProcessGroup]] = {}


class SaveFuture(Generic[T]):
    """A save that a thread completes; the interpreter's exit waits for it.

    The new files take effect once all ranks have written, whether or not :meth:`wait` is called.  An error of one rank
    is an error on all ranks, and the old files stay in effect; the error is logged at once, and :meth:`wait` raises it.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="save")
        self._thread.start()

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> T:
        """Return the save's result once it has ended, or raise its error.  Not collective."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set by the thread

    def _run(self) -> None:
        try:
            if self._finish is not None:
                self._result = self._finish()
        except Exception as error:  # raised by ``wait``
            self._error = error
            logger.exception("an asynchronous save failed; earlier saves are unchanged")
        finally:
            self._finish = None  # frees the host memory that it holds


def save_in_thread(
    finish: Callable[[ModelRanks], T], ranks: ModelRanks, everyone: Sequence[int], resources: ExitStack
) -> SaveFuture[T]:
    """Complete a save in a thread, which then closes ``resources``.  Collective."""
    # ``finish`` gets the ranks with a separate process group: its collectives do not mix with training's collectives.
    separate = _with_own_group(ranks, everyone)
    moved = resources.pop_all()

    def run() -> T:
        with moved:
            return finish(separate)

    future = SaveFuture(run)
    _running[:] = [save for save in _running if not save.done()]
    _running.append(future)  # type: ignore[arg-type]  # read only
    return future


def wait_for_running() -> None:
    """Return once this process's unfinished saves have ended."""
    for save in [save for save in _running if not save.done()]:
        save._thread.join()


def _with_own_group(ranks: ModelRanks, everyone: Sequence[int]) -> ModelRanks:
    """The same ranks, connected by one gloo group for saves only."""
    if not ranks.groups:
        return ranks
    world, group = _groups.get(tuple(everyone), (None, None))
    if group is None or world is not dist.group.WORLD:
        group = local_group(list(everyone), ranks.groups, timeout=_TIMEOUT, backend="gloo")
        _groups[tuple(everyone)] = dist.group.WORLD, group
    return replace(ranks, groups=(group,))
