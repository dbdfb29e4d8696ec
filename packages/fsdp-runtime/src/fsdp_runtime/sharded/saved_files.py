"""Files of saves: on the disk before a rename puts them into effect, and in work directories until then.

Several jobs may save into one directory: a job and its replacement, while both live.  No file is locked: many shared
file systems have no locks.  Names are unique, and one rename puts files into effect or removes them.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath

from fsdp_runtime.errors import OptionError
from fsdp_runtime.sharded.collectives import ModelRanks, raise_on_all

_WORK, _DISCARDED = ".saving-", ".dropped-"
#: Seconds without a change after which unfinished work is abandoned, if its process is unknown or on another machine.
_ABANDONED_AFTER = 24 * 3600.0
_ADVICE = {
    errno.ENOSPC: "Free space on its disk, or save to another directory",
    errno.EDQUOT: "Free space within the quota, or save to another directory",
    errno.ENOENT: "Its directory was removed while it was written to: save again",
    errno.ENAMETOOLONG: "Give a shorter path",
}


def require_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave as the argument ``name``."""
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"{name}={path!r}: give a path, as a string or a pathlib.Path")
    if not os.fspath(path).strip():
        raise OptionError(f"{name}={os.fspath(path)!r} is empty: give a directory; '.' is the current one")
    if "\0" in os.fspath(path):
        raise OptionError(f"{name}={os.fspath(path)!r} contains a null byte")
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            named = f"{os.fspath(path)[:40]!r}..., of {len(os.fspath(path))} characters,"
            raise OptionError(f"{name}={named} is too long for the file system: give a shorter path") from error
    return Path(path)


def is_file_name(name: object) -> bool:
    """Return whether a value names a file in the same directory: a string without a directory part."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )


@contextmanager
def naming_write_errors(path: Path, nbytes: int | None = None) -> Iterator[None]:
    """Add the file's name and intended size to an ``OSError`` of writing; its errno stays."""
    try:
        yield
    except OSError as error:
        reason, size = error.strerror or str(error), "" if nbytes is None else f", a file of {nbytes} bytes"
        raise OSError(
            error.errno or 0,
            f"{reason}: could not write {path}{size}; earlier saves are unchanged. "
            f"{_ADVICE.get(error.errno or 0, 'Save to another directory')}",
        ) from error


@contextmanager
def naming_total(nbytes: int) -> Iterator[None]:
    """Add the bytes of all files to an error of a full disk or quota."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(error.errno, f"{error.strerror}; {nbytes} bytes are needed in all") from error


def fsync_path(path: Path) -> None:
    """Return once a file's content, or the names in a directory, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:  # the error lacks the file's name
        raise OSError(error.errno or 0, error.strerror or str(error), str(path)) from error
    finally:
        os.close(descriptor)


def write_and_fsync(path: Path, content: bytes) -> None:
    """Write a file, and return once the file is on the disk."""
    with naming_write_errors(path, len(content)):
        path.write_bytes(content)
        fsync_path(path)


@contextmanager
def freed_in_background(path: Path) -> Iterator[None]:
    """Close a replaced or removed file in a thread: freeing the blocks of a large file takes seconds."""
    try:
        descriptor = os.open(path, os.O_RDONLY) if os.name == "posix" else None
    except OSError:  # the file does not exist or cannot be opened
        descriptor = None
    try:
        yield
    finally:
        if descriptor is not None:
            threading.Thread(target=os.close, args=(descriptor,), daemon=True).start()


#: Bytes of one system call; the kernel ends a call at 2 GiB.
MOVED_AT_ONCE = 2**26


def create_file(path: Path, start: bytes, nbytes: int) -> None:
    """Create a file with its first bytes and its full size."""
    with naming_write_errors(path, nbytes):
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0) | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(descriptor, start, 0)
            reserve(descriptor, nbytes)
        finally:
            os.close(descriptor)


def write_all(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    """Write bytes at an offset of a file."""
    view = memoryview(content)
    os.lseek(descriptor, offset, os.SEEK_SET)
    while view:
        view = view[os.write(descriptor, view[:MOVED_AT_ONCE]) :]


def reserve(descriptor: int, nbytes: int) -> None:
    """Set a file's size, and reserve its disk space if the file system can; writes are then faster."""
    if _fallocate is not None and _fallocate(descriptor, 0, 0, nbytes) == 0:
        return
    code = ctypes.get_errno() if _fallocate is not None else 0
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, nbytes)  # the file system cannot reserve, or the size is 0


_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None) if sys.platform == "linux" else None
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def move_into_place(source: Path, target: Path) -> None:
    """Rename a complete file or directory atomically and durably; a target that is a directory must not exist."""
    fsync_path(source)
    source.replace(target)
    fsync_path(target.parent)


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
