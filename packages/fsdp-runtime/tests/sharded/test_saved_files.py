"""Several jobs save into one directory: what returned is complete, and only what ended jobs left is removed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch import nn

from faults.writers import KINDS, Writers
from fsdp_runtime import load_training_state, save_training_state, save_weights
from fsdp_runtime.sharded import saved_files
from fsdp_runtime.sharded.collectives import ModelRanks
from fsdp_runtime.sharded.saved_files import naming_write_errors
from fsdp_runtime.training_state import directory


@pytest.mark.parametrize("kind", KINDS)
def test_writers_of_one_directory_lose_nothing_when_some_are_killed(tmp_path: Path, kind: str) -> None:
    writers = Writers(kind, tmp_path / "saved", count=3, seed=1)
    writers.run(seconds=2.0, kill_every=0.35)
    assert writers.kills
    assert writers.returned
    assert writers.problems() == []


def _left_behind(directory: Path, *, alive: bool) -> Path:
    """Unfinished work of another process of this machine."""
    process = subprocess.Popen(["sleep", "60"])
    start, _ = saved_files._start_and_state(process.pid)
    work = directory / f".saving-{saved_files.machine()}-{process.pid}-{start}-00000000"
    work.mkdir()
    if not alive:
        process.kill()
        process.wait()
    return work


def _end(work: Path) -> None:
    """End the process that ``_left_behind`` started, and leave a zombie."""
    pid = int(work.name.split("-")[2])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_work_is_removed_once_its_process_has_ended(tmp_path: Path) -> None:
    living, ended = (_left_behind(tmp_path, alive=alive) for alive in (True, False))
    try:
        with saved_files.work_directory(tmp_path, ModelRanks()) as own:
            assert own.is_dir()
            assert living.is_dir()
            assert not ended.exists()
        save_weights(nn.Linear(2, 2), tmp_path)
        assert living.is_dir()
    finally:
        _end(living)
    save_weights(nn.Linear(2, 2), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]


@pytest.mark.parametrize("name", [".saving-0a1b2c3d", ".saving-ffffffff-1-2-0a1b2c3d", ".saving--1--0a1b2c3d"])
def test_work_of_unknown_processes_is_removed_after_a_day_without_change(tmp_path: Path, name: str) -> None:
    work = tmp_path / name
    work.mkdir()
    (work / "file").touch()
    yesterday = time.time() - 25 * 3600
    os.utime(work, (yesterday, yesterday))
    save_weights(nn.Linear(2, 2), tmp_path)
    assert work.is_dir()
    os.utime(work / "file", (yesterday, yesterday))
    save_weights(nn.Linear(2, 2), tmp_path)
    assert not work.exists()


def test_a_job_removes_no_states_of_another_that_saves_meanwhile(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2):
        save_training_state(tmp_path, model, step=step)
    if (child := os.fork()) == 0:
        save_training_state(tmp_path, model, step=3, keep=9)
        os._exit(0)
    os.waitpid(child, 0)
    for step in (4, 5):
        save_training_state(tmp_path, model, step=step, keep=1)
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["3", "4", "5"]
    assert load_training_state(tmp_path, model).step == 5


def test_a_state_that_the_index_lacks_is_found_and_listed_again(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_training_state(tmp_path, model, step=1)
    index = tmp_path / "training_states.json"
    before = index.read_text()
    save_training_state(tmp_path, model, step=2)
    index.write_text(before)  # as another job does that read it earlier, and is killed
    assert load_training_state(tmp_path, model).step == 2
    save_training_state(tmp_path, model, step=3)
    assert [name in index.read_text() for name in ("step-00000001", "step-00000002", "step-00000003")] == [True] * 3


def test_a_save_that_cannot_write_the_index_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(directory: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = nn.Linear(2, 2)
    monkeypatch.setattr(directory, "unused_path", full)
    save_training_state(tmp_path, model, step=1)
    assert "could not be written" in caplog.text
    assert load_training_state(tmp_path, model).step == 1


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free space on its disk"),
        (errno.ENOENT, "was removed while it was written to: save again"),
        (errno.ENAMETOOLONG, "Give a shorter path"),
        (errno.EACCES, "Save to another directory"),
    ],
)
def test_the_advice_fits_the_error(tmp_path: Path, number: int, advice: str) -> None:
    with pytest.raises(OSError, match=advice) as told, naming_write_errors(tmp_path / "x", 10):
        raise OSError(number, os.strerror(number))
    assert ("Free space" in str(told.value)) == (number == errno.ENOSPC)


def test_shards_of_another_job_stay_while_it_moves_them_into_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    living = _left_behind(tmp_path, alive=True)
    placed = tmp_path / "model-0a1b2c3d-00001-of-00002.safetensors"
    placed.touch()
    try:
        save_weights(model, tmp_path, max_shard_size=300)
        assert placed.exists()
    finally:
        _end(living)
    save_weights(model, tmp_path, max_shard_size=300)
    assert not placed.exists()
