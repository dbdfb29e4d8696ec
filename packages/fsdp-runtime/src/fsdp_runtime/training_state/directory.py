"""The folders of training states: which one counts, and how a new one takes its place at a single moment."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded.fsync import sync, write_synced
from fsdp_runtime.training_state.manifest import MANIFEST

#: Names the states in the order in which they were saved.
INDEX = "training_states.json"
_SAVING, _DROPPED = ".saving-", ".dropped-"


def newest(directory: Path) -> Path:
    """The folder of the state to resume from: the directory itself where it is one, else the newest in it.

    Raises:
        CheckpointError: there is none.
    """
    if (directory / MANIFEST).is_file():
        return directory
    saved = list(_saved(directory))
    if not saved:
        raise CheckpointError(f"{directory} holds no training state: give the directory that one was saved to")
    return directory / saved[-1]


def work_folder(directory: Path) -> Path:
    """A new folder to write a state into, on the same file system; what earlier, killed saves left is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in (_SAVING, _DROPPED):
        for left_over in directory.glob(f"{pattern}*"):
            shutil.rmtree(left_over)
    work = directory / f"{_SAVING}{uuid.uuid4().hex[:8]}"
    work.mkdir()
    return work


def commit(work: Path, step: int, keep: int | None) -> Path:
    """Put a complete state in force by one rename, then drop states beyond ``keep`` older ones.

    The index names the new folder before it is there; an entry without a folder does not count.  So the rename is
    the moment at which the new state takes effect.
    """
    directory = work.parent
    saved = list(_saved(directory))
    final = _unused_name(directory, step)
    _write_index(directory, [*saved, final.name])
    sync(work)
    work.rename(final)
    sync(directory)
    for old in saved[: max(len(saved) - keep, 0)] if keep is not None else ():
        dropped = directory / f"{_DROPPED}{old}"
        (directory / old).rename(dropped)
        shutil.rmtree(dropped)
    return final


def _saved(directory: Path) -> Iterator[str]:
    """The folders of the states in the order of saving."""
    index = directory / INDEX
    if not index.is_file():
        return
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["states"]
        yield from (name for name in names if (directory / name / MANIFEST).is_file())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged ({error!r}): pass the folder of one state in {directory}") from error


def _write_index(directory: Path, names: list[str]) -> None:
    fresh = directory / f"{INDEX}.new"
    write_synced(fresh, (json.dumps({"states": names}, indent=2) + "\n").encode())
    fresh.replace(directory / INDEX)


def _unused_name(directory: Path, step: int) -> Path:
    """``step-00000012``, or with a number behind it where a run that was rolled back saves a step again."""
    usual = directory / f"step-{step:08d}"
    number = 1
    final = usual
    while final.exists():
        number += 1
        final = usual.with_name(f"{usual.name}-{number}")
    return final
