"""A signal to one rank ends the loop on all of them, after the same step."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from fsdp_runtime.monitor import stop_on_signal
from harness.ranks import RankPool


def _steps_done(guilty: int) -> int:
    done = 0
    with stop_on_signal() as must_stop:
        for step in range(5):
            if step == 2 and dist.get_rank() == guilty:
                os.kill(os.getpid(), signal.SIGTERM)
            done += 1
            if must_stop():
                break
    return done


@pytest.mark.parametrize("guilty", [0, 1])
def test_all_ranks_leave_after_the_step_in_which_one_got_a_signal(two_ranks: RankPool, guilty: int) -> None:
    assert two_ranks.run(_steps_done, guilty) == [3, 3]


def test_no_rank_stops_without_a_signal(two_ranks: RankPool) -> None:
    assert two_ranks.run(_steps_done, 7) == [5, 5]


def test_a_second_signal_reaches_the_previous_handler() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    received = []
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with stop_on_signal([signal.SIGUSR1]) as must_stop:
            assert not must_stop()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert must_stop()
            assert received == []
            os.kill(os.getpid(), signal.SIGUSR1)
            assert received == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signal():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
