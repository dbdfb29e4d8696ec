"""Check paths from users, and file names from an index or a manifest."""

from __future__ import annotations

import errno
import os
from pathlib import Path, PurePosixPath, PureWindowsPath

from fsdp_runtime.errors import OptionError


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


def file_version(file: Path) -> tuple[int, ...] | None:
    """Return a value that changes when a file is replaced, or ``None`` if the file does not exist."""
    try:
        with file.open("rb") as opened:  # a network file system asks its server when a file is opened
            status = os.fstat(opened.fileno())
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
