"""Files that survive a crash: written to the disk, not only to the page cache, and put in place by a rename."""

from __future__ import annotations

import os
from pathlib import Path


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
    path.write_bytes(content)
    fsync_path(path)


def move_into_place(source: Path, target: Path) -> None:
    """Rename a complete file or directory to ``target`` on the same file system, atomically and durably.

    Args:
        source: written next to the target under a temporary name.
        target: a file is replaced; a directory must not exist.
    """
    fsync_path(source)
    source.replace(target)
    fsync_path(target.parent)
