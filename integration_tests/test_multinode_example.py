"""The multi-node example's scripts as they stand, on loopback: two nodes, each loss that of one process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness.interpreter import environment

FOLDER = Path(__file__).parents[1] / "docs" / "examples" / "multinode"
STEPS = ("--steps", "3")

# Five decimals are printed; in float32, Adam's first steps carry the order of a sum no further than this.
LAST_DECIMAL = 2e-5

# Slurm's srun, as far as the script needs it: two tasks, one on each node, with the variables that a step sets.
SRUN = """
    #!{python}
    import os, subprocess, sys
    command = [word for word in sys.argv[1:] if not word.startswith("--kill")]
    step = {{"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "0"}}
    tasks = [subprocess.Popen(command, env={{**os.environ, **step, "SLURM_PROCID": str(rank)}}) for rank in range(2)]
    sys.exit(max(task.wait() for task in tasks))
"""


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def ended(*started: subprocess.Popen[str]) -> list[str]:
    """What processes print that run beside one another; all of them must end well."""
    said = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), said
    return [printed for printed, _ in said]


def start(*command: str | Path, **changes: str) -> subprocess.Popen[str]:
    variables = environment(**changes)
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process, which no launcher started."""
    (printed,) = ended(start("python", FOLDER / "train.py", *STEPS))
    assert "rank 0 of 1" in printed
    found = losses(printed)
    assert found[2] < found[0]
    return found


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", printed, flags=re.MULTILINE)]


def test_two_nodes_under_torchrun_train_as_one_process(alone: list[float]) -> None:
    common = {"NODES": "2", "HEAD_ADDRESS": "127.0.0.1", "HEAD_PORT": free_port(), "RANKS_PER_NODE": "1"}
    script = ("bash", FOLDER / "torchrun.sh", *STEPS)
    first, second = ended(*(start(*script, NODE_RANK=str(node), **common) for node in range(2)))
    assert "rank 0 of 2" in first
    assert "rank 1 of 2" in second
    assert losses(first) == pytest.approx(alone, abs=LAST_DECIMAL)
    assert losses(second) == []


@pytest.mark.slow
def test_two_nodes_under_slurm_train_as_one_process(alone: list[float], tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(textwrap.dedent(SRUN.format(python=sys.executable)).lstrip())
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(FOLDER), "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "2"}
    path = os.pathsep.join([str(tmp_path), environment()["PATH"]])
    (printed,) = ended(start("bash", FOLDER / "slurm.sbatch", *STEPS, "--shard-over-nodes", PATH=path, **job))
    assert {"rank 0 of 2", "rank 1 of 2"} <= {line.partition(" on ")[0] for line in printed.splitlines()}
    assert losses(printed) == pytest.approx(alone, abs=LAST_DECIMAL)


@pytest.mark.parametrize(("script", "variable"), [("torchrun.sh", "NODES"), ("slurm.sbatch", "SLURM_SUBMIT_DIR")])
def test_a_script_started_without_its_launcher_names_the_missing_variable(script: str, variable: str) -> None:
    process = start("bash", FOLDER / script)
    assert process.wait(timeout=60) != 0
    assert variable in process.communicate()[1]
