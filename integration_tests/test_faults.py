"""One fault of the campaign on two ranks, so that ``nox -s soak -- faults`` stays able to try them all on four."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.campaign import Campaign


def test_a_killed_rank_is_named_in_time_and_training_resumes_with_the_same_losses(tmp_path: Path) -> None:
    (row,) = Campaign(tmp_path, timeout=5.0, axes={"dp_shard": 2}).run("kill -9 during backward")
    assert row.problems == ()
    assert (row.resumed, row.lost) == (4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("levers", ["host", "8bit"])
def test_a_save_of_levers_that_is_killed_leaves_the_last_whole_one(tmp_path: Path, levers: str) -> None:
    (row,) = Campaign(tmp_path, timeout=5.0, axes={"dp_shard": 2}, levers=levers).run("^kill -9 during save$")
    assert row.problems == ()
    assert (row.resumed, row.lost) == (4, 0)


def _assert_stages_end(campaign: Campaign, names: str, count: int) -> None:
    rows = list(campaign.run(names))
    assert len(rows) == count
    assert not [(row.fault, row.problems) for row in rows if row.problems]


def test_a_stage_that_raises_in_a_schedule_is_named_on_all_ranks(tmp_path: Path) -> None:
    _assert_stages_end(Campaign(tmp_path, timeout=5.0, axes={"pp": 2}), "exception during steady", 1)


@pytest.mark.slow
def test_a_stage_that_ends_in_any_phase_is_named_on_all_ranks(tmp_path: Path) -> None:
    _assert_stages_end(Campaign(tmp_path, timeout=5.0, axes={"pp": 2}), "", 12)
