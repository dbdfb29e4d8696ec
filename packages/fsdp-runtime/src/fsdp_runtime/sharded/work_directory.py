"""Directories of unfinished files beside the finished files, and the removal of abandoned directories.

Several jobs may save into one directory: a job and its replacement, while both live.  No file is locked: many shared
file systems have no locks.  Names are unique, and one rename puts files into effect or removes them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded.collectives import ModelRanks, raise_on_all

_WORK, _DISCARDED = ".saving-", ".dropped-"
#: Seconds without a change after which unfinished work is abandoned, if its process is unknown or on another machine.
_ABANDONED_AFTER = 24 * 3600.0


@contextmanager
def work_directory(target: Path, ranks: ModelRanks) -> Iterator[Path]:
    """Yield a new directory in ``target``, which all ranks see; remove it unless it is renamed.  Collective."""
    work = None
    try:
        with raise_on_all(ranks) as made:
            if ranks.is_first:
                target.mkdir(parents=True, exist_ok=True)
                made.value = work = unused_path(target)
                work.mkdir()
                _remove_abandoned(work)
        shared: Path = made.values[ranks.global_first]
        with raise_on_all(ranks):
            if not shared.is_dir():
                raise OptionError(
                    f"directory: rank {ranks.rank} does not see {shared}, which rank {ranks.global_first} created: "
                    "give a directory on a file system that all hosts share"
                )
        yield shared
    finally:
        if work is not None:
            remove_work(work)


def remove_work(work: Path) -> None:
    """Remove a work directory after its files are in place; other ranks wait, as they may list its folder."""
    shutil.rmtree(work, ignore_errors=True)


def unused_path(directory: Path) -> Path:
    """Return a path in ``directory`` for unfinished work of this process; its name identifies the process."""
    pid = os.getpid()
    return directory / f"{_WORK}{machine()}-{pid}-{_start_and_state(pid)[0]}-{uuid.uuid4().hex[:8]}"


def others_at_work(work: Path) -> bool:
    """Return whether other processes have unfinished work in the directory of ``work``."""
    return any(path.name != work.name for path in work.parent.glob(f"{_WORK}*"))


def discard(path: Path) -> None:
    """Remove a file or directory, by a rename first; another process may have removed the path already."""
    discarded = path.with_name(f"{_DISCARDED}{uuid.uuid4().hex[:8]}")
    with suppress(FileNotFoundError):
        path.rename(discarded)
        _remove(discarded)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # the next save removes the remaining files
    else:
        path.unlink(missing_ok=True)


def _remove_abandoned(work: Path) -> None:
    """Remove the work of ended processes beside ``work``; ``work`` was created just now."""
    for path in work.parent.glob(f"{_DISCARDED}*"):
        _remove(path)
    now = work.stat().st_mtime  # the file system's clock
    for path in work.parent.glob(f"{_WORK}*"):
        if path != work and _is_abandoned(path, now):
            discard(path)


def _is_abandoned(path: Path, now: float) -> bool:
    own_machine, _, process = path.name.removeprefix(_WORK).partition("-")
    pid, _, start = process.rpartition("-")[0].partition("-")
    if own_machine == machine() != "" and pid.isdigit():
        return _has_ended(int(pid), start)
    try:
        changes = [file.stat().st_mtime for file in (path, *path.glob("*"))]
    except OSError:  # another process is changing the directory
        return False
    return max(changes) < now - _ABANDONED_AFTER


def _has_ended(pid: int, start: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process
        pass
    started, state = _start_and_state(pid)
    return started not in ("", start) or state in ("Z", "X")


def machine() -> str:
    """Return 8 digits that identify this boot and PID namespace, or an empty text if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        identity = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
    return hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()


def _start_and_state(pid: int) -> tuple[str, str]:
    """Return a process's start, in ticks since the boot, and its state; a later process may reuse its id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[19], fields[0]
