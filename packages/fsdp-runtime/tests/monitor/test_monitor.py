"""Monitoring: a lost rank is named with its phase on every other rank, and no other rank is named."""

from __future__ import annotations

import pickle
import time

import pytest
import torch.distributed as dist

from fsdp_runtime import OptionError
from fsdp_runtime.errors import OtherRankError
from fsdp_runtime.monitor import LostRankError, monitor_ranks
from fsdp_runtime.monitor.distributed import FailureDetector, Heartbeat
from harness.pairwise import alternating_first
from harness.ranks import RankError, RankPool, RanksFailed

# What signs of life tell.


def test_a_rank_is_lost_if_its_heartbeat_is_unchanged_for_longer_than_the_timeout() -> None:
    detector = FailureDetector(interval=1.0, timeout=3.0)
    detector.update({2: Heartbeat(count=5, phase="backward")})
    found = [detector.update({2: Heartbeat(count=5, phase="backward")}) for _ in range(4)]
    assert found[:3] == [None] * 3
    assert (found[3].rank, found[3].phase) == (2, "backward")


def test_a_new_heartbeat_restarts_the_timeout() -> None:
    detector = FailureDetector(interval=1.0, timeout=3.0)
    for beat in (1, 1, 1, 2, 2, 2, 3, 3, 3):
        assert detector.update({2: Heartbeat(count=beat)}) is None


def test_a_finished_rank_may_be_silent() -> None:
    detector = FailureDetector(interval=1.0, timeout=3.0)
    assert not any(detector.update({2: Heartbeat(count=1, state="finished")}) for _ in range(9))
    assert detector.all_finished()


def test_a_rank_that_raised_is_named_before_silent_ranks() -> None:
    detector = FailureDetector(interval=1.0, timeout=3.0)
    for _ in range(4):
        detector.update({1: Heartbeat(count=1)})
    found = detector.update(
        {1: Heartbeat(count=1), 2: Heartbeat(count=7, phase="save", state="failed", message="OSError: full")}
    )
    assert (found.rank, found.phase, found.reason) == (2, "save", "raised OSError: full")


# On running ranks; dead and stopped ones are for ``nox -s soak -- faults``.


def _one_raises(guilty: int, error: Exception) -> None:
    with monitor_ranks(timeout=2.0) as monitor:
        with monitor.phase("load"):
            dist.barrier()
        with monitor.phase("forward"):
            if dist.get_rank() == guilty:
                raise error
            while True:
                with monitor.phase("waiting"):
                    time.sleep(0.02)


@pytest.mark.parametrize(
    ("error", "guilty"),
    alternating_first([ValueError("broken data"), RuntimeError("shapes do not match")], [0, 1]),
    ids=str,
)
def test_the_rank_that_raises_keeps_its_error_and_the_other_names_it(
    two_ranks: RankPool, guilty: int, error: Exception
) -> None:
    with pytest.raises(RanksFailed) as failure:
        two_ranks.run(_one_raises, guilty, error)
    own, other = failure.value.errors[guilty], failure.value.errors[1 - guilty]
    assert (own.type_name, own.message) == (type(error).__name__, str(error))
    assert f"on rank {guilty}, in phase 'forward'" in own.traceback
    assert other.type_name == "LostRankError"
    assert f"rank {guilty}, in phase 'forward', raised {type(error).__name__}: {error}" in other.message
    assert f"reported by rank {1 - guilty} in phase" in other.message  # whichever it had got to


def _one_follows(guilty: int) -> None:
    with monitor_ranks(timeout=2.0) as monitor, monitor.phase("save"):
        if dist.get_rank() == guilty:
            time.sleep(0.5)
            raise ValueError("broken data")
        raise OtherRankError("a rank has ended")


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_fails_because_another_did_names_that_one(two_ranks: RankPool, guilty: int) -> None:
    with pytest.raises(RanksFailed) as failure:
        two_ranks.run(_one_follows, guilty)
    other = failure.value.errors[1 - guilty]
    assert other.type_name == "LostRankError"
    assert f"rank {guilty}, in phase 'save', raised ValueError: broken data" in other.message


def _quiet_work(seconds: float) -> str:
    """One rank waits for the other for longer than the time-out, and nothing is wrong; then monitors again."""
    for wait in (seconds, 0.0):
        with monitor_ranks(timeout=2.0) as monitor, monitor.phase("backward"):
            if dist.get_rank() == 1:
                time.sleep(wait)
            dist.barrier()
    return "done"


def _seconds_to_end(late: int) -> float:
    with monitor_ranks(timeout=300.0) as monitor:
        with monitor.phase("forward"):
            dist.barrier()
        begun = time.monotonic()
        if dist.get_rank() == late:
            time.sleep(0.5)
    return time.monotonic() - begun


@pytest.mark.parametrize("late", [0, 1])
def test_the_end_does_not_wait_for_a_round(two_ranks: RankPool, late: int) -> None:
    assert max(two_ranks.run(_seconds_to_end, late)) < 15  # of 30 between rounds


def test_a_slow_rank_is_not_lost(two_ranks: RankPool) -> None:
    assert two_ranks.run(_quiet_work, 2.5) == ["done", "done"]


def _never_watches() -> None:
    if dist.get_rank() == 0:
        with monitor_ranks(timeout=1.0):
            pass


def test_a_rank_that_never_starts_monitoring_is_named(two_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as failure:
        two_ranks.run(_never_watches)
    error: RankError = failure.value.errors[0]
    assert "ranks [1] did not start monitoring within 1 s" in error.message


def test_errors_of_a_single_process_name_the_phase() -> None:
    with pytest.raises(RuntimeError, match="own") as failure, monitor_ranks() as monitor, monitor.phase("forward"):
        raise RuntimeError("own")
    assert failure.value.__notes__ == ["on rank 0, in phase 'forward'"]


def test_a_timeout_of_zero_is_refused() -> None:
    with pytest.raises(OptionError, match="timeout=0"), monitor_ranks(timeout=0):
        pass


def test_the_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(LostRankError(3, "save", "was killed")))
    assert (error.rank, error.phase, str(error)) == (3, "save", "rank 3, in phase 'save', was killed")
