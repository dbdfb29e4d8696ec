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
