"""Leaving a training loop in order when the job is told to end."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fsdp_runtime.sharded.collectives import ranks_of_world, tell_all

logger = logging.getLogger(__name__)


@contextmanager
def stop_on_signal(signals: Sequence[int] = (signal.SIGTERM,)) -> Iterator[Callable[[], bool]]:
    """Let a loop finish its step, save and leave when a signal asks the job to end.

    Schedulers send SIGTERM some time before they kill (Slurm's ``--signal`` and ``KillWait``, Kubernetes' grace
    period), and to some ranks before others or to one only::

        with stop_on_signal() as must_stop:
            for step in range(steps):
                train_a_step()
                if must_stop():
                    save_training_state(directory, model, optimizer, step=step + 1)
                    break

    Args:
        signals: which ones ask; a second one does what it did before.

    Yields:
        A function to be called by every rank after each step.  It says, alike on all, whether any of them has been
        asked; collective over the world, a few bytes a rank.

    Raises:
        ValueError: not in the main thread, the only one where Python installs handlers.
    """
    asked: list[int] = []
    before: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(number, before[number])

    def must_stop() -> bool:
        told = {rank for rank, was_asked in tell_all(ranks_of_world(), bool(asked)).items() if was_asked}
        if told:
            logger.warning("asked to stop (ranks %s): leaving after this step", sorted(told))
        return bool(told)

    try:
        for number in signals:
            before[number] = signal.getsignal(number)
            signal.signal(number, ask)
        yield must_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
