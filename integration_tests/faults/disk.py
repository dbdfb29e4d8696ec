"""What happens to disks: one that is full, and files that are not what was written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)


#: What happens to which file of a state.
DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "flipped bit in a shard": ("rank-00001.safetensors", _flip),
    "truncated shard": ("rank-00003.safetensors", lambda file: os.truncate(file, 5000)),
    "missing shard": ("rank-00002.safetensors", Path.unlink),
    "flipped bit in the manifest": ("manifest.json", _flip),
    "flipped bit in the random states": ("rank-00000.rng.pt", _flip),
}


@contextmanager
def small_disk(directory: Path, size: int) -> Iterator[None]:
    """A file system of its own, of so many bytes, at a new directory.

    Raises:
        PermissionError: this process may not mount one.
    """
    directory.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        raise PermissionError(mounted.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
