"""Calls to an engine that run while the trainer does its part, and calls whose errors do not matter."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from fsdp_runtime.errors import WeightSyncError

#: The longest that the trainer waits for an engine to say what became of an update that failed.
LAST_WORD_S = 5.0


class Background:
    """Run a call in a thread while the body runs; an error of the call comes first, since it has the reason."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[Any] = self._pool.submit(call)

    def __enter__(self) -> Future[Any]:
        return self._future

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._pool.shutdown(wait=False)
        if error is None:
            return
        with suppress(TimeoutError):
            reason = self._future.exception(timeout=LAST_WORD_S)
            if reason is not None and reason is not error:
                raise WeightSyncError(str(reason)) from error


def ignore_errors(call: Callable[[], Any]) -> None:
    """Call where another error is the one to report."""
    with suppress(Exception):
        call()
