"""Directories of training states: find the newest state, and commit a new one atomically."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded.fsync import move_into_place
from fsdp_runtime.sharded.paths import is_file_name
from fsdp_runtime.training_state.manifest import MANIFEST

#: Names of the states, in the order in which they were saved.
INDEX = "training_states.json"
_SAVING, _DROPPED = ".saving-", ".dropped-"


def newest_state(directory: Path) -> Path:
    """Return the directory of the state to resume from: ``directory`` itself, or the newest state in it.

    Raises:
        CheckpointError: there is no state.
    """
    if (directory / MANIFEST).is_file():
        return directory
    saved = list(_saved_states(directory))
    if not saved:
        raise CheckpointError(f"{directory} holds no training state: give the directory that one was saved to")
    return directory / saved[-1]


def make_work_directory(directory: Path) -> Path:
    """Create a directory to write a state into, on the same file system; remove what killed saves left behind."""
    directory.mkdir(parents=True, exist_ok=True)
    for prefix in (_SAVING, _DROPPED):
        for abandoned in directory.glob(f"{prefix}*"):
            shutil.rmtree(abandoned)
    work = directory / f"{_SAVING}{uuid.uuid4().hex[:8]}"
    work.mkdir()
    return work


def commit(work: Path, step: int, keep: int | None) -> Path:
    """Make a complete state take effect by one rename, then remove older states beyond ``keep``.

    The index lists the new directory before it exists, and entries without a directory are ignored.  The rename is
    therefore the point at which the new state takes effect.
    """
    directory = work.parent
    saved = list(_saved_states(directory))
    final = _unused_name(directory, step)
    _write_index(directory, [*saved, final.name])
    move_into_place(work, final)
    for old in saved[: max(len(saved) - keep, 0)] if keep is not None else ():
        dropped = directory / f"{_DROPPED}{old}"
        (directory / old).rename(dropped)
        shutil.rmtree(dropped)
    return final


def _saved_states(directory: Path) -> Iterator[str]:
    """Yield the names of the states' directories in the order of saving."""
    index = directory / INDEX
    if not index.is_file():
        return
    try:
        names = list(json.loads(index.read_text(encoding="utf-8"))["states"])
        if outside := [name for name in names if not is_file_name(name)]:
            raise ValueError(f"{outside[0]!r} is not the name of a directory in {directory}")
        yield from (name for name in names if (directory / name / MANIFEST).is_file())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is damaged ({error!r}): pass the directory of one state in {directory}"
        ) from error


def _write_index(directory: Path, names: list[str]) -> None:
    new = directory / f"{INDEX}.new"
    new.write_bytes((json.dumps({"states": names}, indent=2) + "\n").encode())
    move_into_place(new, directory / INDEX)


def _unused_name(directory: Path, step: int) -> Path:
    """Return ``step-00000012``, with a number appended if a run that was rolled back saves a step again."""
    usual = directory / f"step-{step:08d}"
    number = 1
    final = usual
    while final.exists():
        number += 1
        final = usual.with_name(f"{usual.name}-{number}")
    return final
