"""A rank that fails ends the whole job promptly, and its message reaches the user."""

from __future__ import annotations

import time
from pathlib import Path

from harness.torchrun import torchrun

SCRIPTS = Path(__file__).parent / "scripts"


def test_a_failing_rank_ends_the_job_with_its_message() -> None:
    start = time.monotonic()
    job = torchrun("failing_rank.py", ranks=2, cwd=SCRIPTS, timeout=120)
    assert job.returncode != 0
    assert "ValueError: planted: the data of rank 1 is broken" in job.stderr
    assert "rank      : 1 (local_rank: 1)" in job.stderr
    # The waiting rank is ended by torchrun, not by its collectives' time-out of minutes.
    assert time.monotonic() - start < 90
