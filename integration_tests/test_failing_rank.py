"""A rank that fails ends the whole job promptly, and its message reaches the user."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def test_a_failing_rank_ends_the_job_with_its_message() -> None:
    start = time.monotonic()
    job = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "failing_rank.py"],
        cwd=HERE / "scripts",
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path[1:]])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode != 0
    assert "ValueError: planted: the data of rank 1 is broken" in job.stderr
    assert "rank      : 1 (local_rank: 1)" in job.stderr
    # The waiting rank is ended by torchrun, not by its collectives' time-out of minutes.
    assert time.monotonic() - start < 90
