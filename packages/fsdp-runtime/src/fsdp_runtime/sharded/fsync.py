"""Write files that survive a crash: on the disk, not only in the page cache, and in place by a rename."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ADVICE = {
    errno.ENOSPC: "Free space on its disk, or save to another directory",
    errno.EDQUOT: "Free space within the quota, or save to another directory",
    errno.ENOENT: "Its directory was removed while it was written to: save again",
    errno.ENAMETOOLONG: "Give a shorter path",
}


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
