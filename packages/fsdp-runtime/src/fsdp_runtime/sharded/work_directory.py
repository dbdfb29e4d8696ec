"""Directories of unfinished files beside the finished ones, and which of them a process that lives still writes to.

Several jobs may save into one directory: a job and its replacement, while both live.  No file is locked, for many
shared file systems have no locks.  Names are unique, and one rename makes files take effect or takes them away.
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
#: Seconds without a change after which the work of a process on another machine, or of an unknown one, is abandoned.
_ABANDONED_AFTER = 24 * 3600.0


@contextmanager
def work_directory(target: Path, ranks: ModelRanks) -> Iterator[Path]:
    """Yield a new directory in ``target``, the same on all ranks; one that keeps its name is removed.  Collective."""
    own = None
    try:
        with raise_on_all(ranks) as made:
            if ranks.is_first:
                target.mkdir(parents=True, exist_ok=True)
                made.value = own = unused_path(target)
                own.mkdir()
                _remove_abandoned(own)
        yield made.values[ranks.global_first]
    finally:
        if own is not None:
            remove_work(own)


def require_seen(work: Path, ranks: ModelRanks) -> None:
    """Raise on a rank that does not see the work directory, and is going to write to it."""
    if not work.is_dir():
        raise OptionError(
            f"directory: rank {ranks.rank} does not see {work}, which rank {ranks.global_first} created: give a "
            "directory on a file system that all hosts share"
        )


def remove_work(own: Path) -> None:
    """Remove a work directory; once its files are in place, before other ranks go on, which may walk its folder."""
    shutil.rmtree(own, ignore_errors=True)


def unused_path(directory: Path) -> Path:
    """Return a path in ``directory`` for unfinished work of this process; its name says which process that is."""
    pid = os.getpid()
    return directory / f"{_WORK}{_machine()}-{pid}-{_start_and_state(pid)[0]}-{uuid.uuid4().hex[:8]}"


def others_at_work(own: Path) -> bool:
    """Return whether other processes have unfinished work in the directory of the work ``own``."""
    return any(path.name != own.name for path in own.parent.glob(f"{_WORK}*"))


def discard(path: Path) -> None:
    """Remove a file or a directory: one rename takes it away at once.  Another process may have removed it already."""
    discarded = path.with_name(f"{_DISCARDED}{uuid.uuid4().hex[:8]}")
    with suppress(FileNotFoundError):
        path.rename(discarded)
        _remove(discarded)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # the next save removes what is left
    else:
        path.unlink(missing_ok=True)


def _remove_abandoned(own: Path) -> None:
    """Remove the work of processes that have ended beside ``own``, which was created just now."""
    for path in own.parent.glob(f"{_DISCARDED}*"):
        _remove(path)
    now = own.stat().st_mtime  # by the clock of the file system
    for path in own.parent.glob(f"{_WORK}*"):
        if path != own and _is_abandoned(path, now):
            discard(path)


def _is_abandoned(path: Path, now: float) -> bool:
    machine, _, process = path.name.removeprefix(_WORK).partition("-")
    pid, _, start = process.rpartition("-")[0].partition("-")
    if machine == _machine() != "" and pid.isdigit():
        return _has_ended(int(pid), start)
    try:
        changes = [each.stat().st_mtime for each in (path, *path.glob("*"))]
    except OSError:  # it changes just now
        return False
    return max(changes) < now - _ABANDONED_AFTER


def _has_ended(pid: int, start: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    found, state = _start_and_state(pid)
    return found not in ("", start) or state in ("Z", "X")


def _machine() -> str:
    """Return 8 digits for this boot and this container's process ids, nothing where they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        identity = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
    return hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()


def _start_and_state(pid: int) -> tuple[str, str]:
    """Return when a process began, in ticks since the boot, and its state; its id may be used again later."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[19], fields[0]
