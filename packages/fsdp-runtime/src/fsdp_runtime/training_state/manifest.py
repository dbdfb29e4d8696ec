"""The manifest of a training state: every tensor's chunks in the ranks' files, with sizes and checksums."""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded.fsync import write_and_fsync

MANIFEST = "manifest.json"
#: Version of the files' layout.
FORMAT = 2


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor in one rank's file, stored there under the tensor's name.

    Args:
        file: the file's name.
        start: index of the chunk's first element in the full tensor.
        shape: the chunk's shape.
        checksum: CRC-32 of its bytes.
    """

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: its full shape, its dtype in torch's notation (``"bfloat16"``) and its chunks."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a training state except the values.

    Args:
        step: the number that the user gave.
        world_size: number of ranks that wrote it.
        mesh: axes and sizes of the model's mesh; empty for a plain model.
        tensors: by name: ``model/<name>`` and ``optimizer/<index>/<name>/<state>``.
        files: size in bytes and checksum of every other file.
    """

    step: int
    world_size: int
    mesh: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, tuple[int, int]]

    def write(self, directory: Path) -> None:
        """Write the manifest, preceded by its own checksum."""
        content = json.dumps({"format": FORMAT, **asdict(self)}).encode()
        write_and_fsync(directory / MANIFEST, b"%08x\n%s\n" % (zlib.crc32(content), content))


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a training state.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    path = directory / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {directory} is not a training state") from error
    checksum, _, content = text.removesuffix("\n").partition("\n")
    if f"{zlib.crc32(content.encode()):08x}" != checksum:
        raise CheckpointError(f"{path} ({len(text)} characters) is truncated or corrupt: resume from an older state")
    fields: dict[str, Any] = json.loads(content)
    if (found := fields.pop("format")) != FORMAT:
        raise CheckpointError(
            f"{path} has format {found}, and this version of fsdp-runtime reads format {FORMAT}: resume with the "
            "version that saved it"
        )
    tensors = {name: _tensor(stored) for name, stored in fields.pop("tensors").items()}
    files = {name: (size, checksum) for name, (size, checksum) in fields.pop("files").items()}
    return Manifest(tensors=tensors, files=files, **fields)


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of a contiguous tensor on the CPU."""
    return zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())) if tensor.nbytes else 0


def _tensor(stored: Mapping[str, Any]) -> StoredTensor:
    chunks = tuple(
        StoredChunk(chunk["file"], tuple(chunk["start"]), tuple(chunk["shape"]), chunk["checksum"])
        for chunk in stored["chunks"]
    )
    return StoredTensor(tuple(stored["shape"]), stored["dtype"], chunks)
