"""Files that survive a crash: written to the disk, not only to the page cache, and put in place by a rename."""

from __future__ import annotations

import errno
import os
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
def naming_write_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Say which file an ``OSError`` of writing is about, with its errno, and how large the file was to become."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno or 0,
            f"{reason}: could not write {path}, a file of {nbytes} bytes; what was saved before is unchanged. "
            f"{_ADVICE.get(error.errno or 0, 'Save to another directory')}",
        ) from error


def fsync_path(path: Path) -> None:
    """Return once a file's content, or the names in a directory, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_and_fsync(path: Path, content: bytes) -> None:
    """Write a file and return once it is on the disk."""
    with naming_write_errors(path, len(content)):
        path.write_bytes(content)
        fsync_path(path)


def move_into_place(source: Path, target: Path) -> None:
    """Rename a complete file or directory on the same file system, atomically and durably.

    A target that is a file is replaced; one that is a directory must not exist.
    """
    fsync_path(source)
    source.replace(target)
    fsync_path(target.parent)
