"""End a training loop in order when a signal asks the job to stop."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded.collectives import all_gather_objects, own_rank, world_ranks

logger = logging.getLogger(__name__)


@contextmanager
def stop_on_signal(signals: Sequence[int] = (signal.SIGTERM,)) -> Iterator[Callable[[], bool]]:
    """Let a loop finish its step, save and leave when a signal asks the job to end.

    Schedulers send SIGTERM some time before they kill (Slurm's ``--signal`` and ``KillWait``, Kubernetes' grace
    period), possibly to single ranks only.

    Args:
        signals: the signals to handle; a repeated signal reaches the previous handler.

    Yields:
        A function that every rank calls after each step.  It returns, equally on all ranks, whether any rank has
        received a signal.  Collective over the world, a few bytes per rank.

    Raises:
        OptionError: a number is not a signal number.
        ValueError: not called in the main thread, the only thread in which Python can install handlers.

    Example:
        >>> import os, signal
        >>> from fsdp_runtime.monitor import stop_on_signal
        >>> with stop_on_signal() as must_stop:
        ...     for step in range(10):
        ...         if step == 3:
        ...             os.kill(os.getpid(), signal.SIGTERM)
        ...         if must_stop():
        ...             print(f"save and leave after step {step}")
        ...             break
        save and leave after step 3
    """
    signals = tuple(signals)
    if unknown := [number for number in signals if number not in signal.valid_signals()]:
        raise OptionError(f"signals={unknown}: give numbers of signals, such as signal.SIGTERM")
    received: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    def must_stop() -> bool:
        flags = all_gather_objects(world_ranks(), bool(received))
        ranks = sorted(rank for rank, flag in flags.items() if flag)
        if ranks and own_rank() == 0:
            logger.warning("received a stop signal (ranks %s): leaving after this step", ranks)
        return bool(ranks)

    try:
        for number in signals:
            previous[number] = signal.getsignal(number)
            signal.signal(number, handle)
        yield must_stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
