"""Directories of training states: find the newest state, and commit a new state atomically beside other jobs.

A state takes effect when its complete directory gets its name.  The index records the order.  It is written after the
rename, so states that the index lacks are newer than its last state.  A writer of the index reads the directory again
until both agree, so the last writer lists every state.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded.fsync import move_into_place
from fsdp_runtime.sharded.paths import is_file_name
from fsdp_runtime.sharded.work_directory import discard, unused_path
from fsdp_runtime.training_state.manifest import MANIFEST

#: Names of the states, in the order of saving.
INDEX = "training_states.json"

logger = logging.getLogger(__name__)
#: The states that this process may remove, by directory: the states at its first access, and its own states.
_removable: dict[str, set[str]] = {}


def newest_state(directory: Path) -> Path:
    """Return the directory of the state to resume from: ``directory`` itself, or the newest state in it."""
    if (directory / MANIFEST).is_file():
        with suppress(CheckpointError):  # a damaged index does not matter here
            _removable_states(directory.absolute().parent)
        return directory
    if not (saved := _saved_states(directory)):
        raise CheckpointError(f"{directory} holds no training state: give the directory that one was saved to")
    _removable_states(directory)
    return directory / saved[-1]


def commit(work: Path, step: int, keep: int | None) -> Path:
    """Put a complete state into effect by one rename, then remove older states beyond ``keep``."""
    directory = work.parent
    removable = _removable_states(directory)
    final = _place(work, step)
    removable.add(final.name)
    try:
        while (names := _saved_states(directory)) != _listed(directory):
            new = unused_path(directory)
            try:
                new.write_bytes((json.dumps({"states": names}, indent=2) + "\n").encode())
                move_into_place(new, directory / INDEX)
            finally:
                new.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is saved; %s could not be written (%s); the next save writes it", final, INDEX, error)
    if keep is not None:
        older = [name for name in _saved_states(directory) if name in removable and name != final.name]
        for name in older[: max(len(older) - keep, 0)]:
            discard(directory / name)
    return final


def _removable_states(directory: Path) -> set[str]:
    """Return the states that this process may remove, without states that another job saves meanwhile."""
    path = os.path.realpath(directory)
    if path not in _removable:
        _removable[path] = set(_saved_states(directory))
    return _removable[path]


def _saved_states(directory: Path) -> list[str]:
    """Return the names of the states' directories in the order of saving."""
    listed = [name for name in _listed(directory) if (directory / name / MANIFEST).is_file()]
    others = []
    for manifest in directory.glob(f"[!.]*/{MANIFEST}"):
        if manifest.parent.name not in listed:
            try:
                others.append((manifest.stat().st_mtime_ns, manifest.parent.name))
            except FileNotFoundError:  # another job removed the state
                continue
    return [*listed, *(name for _, name in sorted(others))]


def _listed(directory: Path) -> list[str]:
    index = directory / INDEX
    try:
        names = list(json.loads(index.read_text(encoding="utf-8"))["states"])
        if outside := [name for name in names if not is_file_name(name)]:
            raise ValueError(f"{outside[0]!r} is not the name of a directory in {directory}")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is damaged ({error!r}): pass the directory of one state in {directory}"
        ) from error
    return names


def _place(work: Path, step: int) -> Path:
    """Rename to ``step-00000012``, with a number appended if a rolled-back run or another job has saved that step."""
    usual = work.with_name(f"step-{step:08d}")
    final, number = usual, 1
    while True:
        try:
            if not final.exists():
                move_into_place(work, final)
                return final
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another job took the name just now
                raise
        number += 1
        final = usual.with_name(f"{usual.name}-{number}")
