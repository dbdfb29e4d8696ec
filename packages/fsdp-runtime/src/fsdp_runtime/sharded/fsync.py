"""Getting files onto the disk, and not only into the page cache."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return once a file, or the names in a directory, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Write a whole file and return once it is on the disk."""
    path.write_bytes(content)
    sync(path)
