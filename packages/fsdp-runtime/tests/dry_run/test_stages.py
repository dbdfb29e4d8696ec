"""Schedules of pipeline stages in a dry run: the actions of torch's schedules, and the time that ranks wait."""

from __future__ import annotations

from collections import Counter

import pytest

from fsdp_runtime import MeshSpec
from fsdp_runtime.dry_run import estimate
from fsdp_runtime.dry_run.stages.replay import Turn, actions_by_rank, finish_times
from fsdp_runtime.dry_run.trace.fake_world import fake_world
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.steps import Pipeline
from fsdp_runtime.steps.pipeline.parts import StagedModel
from fsdp_runtime.steps.pipeline.step import SCHEDULES

PP, BATCHES = 4, 8
TIMES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def _order(schedule: str, rank: int = 0) -> dict[int, list[Turn]]:
    step = Pipeline(schedule, microbatches=BATCHES)
    with fake_world(MeshSpec(pp=PP), rank=rank) as mesh:
        return actions_by_rank(StagedModel(ranks=step.stage_ranks(PP), mesh=mesh["pp"], schedules=step))


def _bubble(schedule: str) -> float:
    order = _order(schedule)
    ends = finish_times(order, lambda _, turn: TIMES[turn.kind])
    busy = sum(TIMES[turn.kind] for turns in order.values() for turn in turns)
    return 1 - busy / (PP * max(ends.values()))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_actions_by_rank_run_each_micro_batch_once_on_each_stage(schedule: str) -> None:
    counts: Counter[tuple[int, int, str]] = Counter()
    for turns in _order(schedule, rank=PP - 1).values():
        counts.update((turn.stage, turn.batch, turn.kind) for turn in turns)
    stages = len(Pipeline(schedule).stage_ranks(PP))
    for stage in range(stages):
        for batch in range(BATCHES):
            kinds = sorted(kind for (s, b, kind), n in counts.items() for _ in range(n) if (s, b) == (stage, batch))
            assert kinds in (["B", "F"], ["F", "I", "W"])
    assert sum(counts.values()) == sum(1 for _ in counts)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_finish_times_of_equal_stages_have_the_published_bubble(schedule: str) -> None:
    assert _bubble(schedule) == pytest.approx((PP - 1) / (BATCHES + PP - 1))  # arXiv:2104.04473


def test_finish_times_of_split_backwards_leave_a_smaller_bubble() -> None:
    assert _bubble("ZBVZeroBubble") < _bubble("Interleaved1F1B") < _bubble("1F1B")


def test_estimate_refuses_micro_batches_beside_those_of_the_pipeline() -> None:
    with pytest.raises(EstimateError, match="give the second alone"):
        estimate("config.json", {"pp": 2}, seq_len=8, micro_batches=2, steps=(Pipeline(),))
