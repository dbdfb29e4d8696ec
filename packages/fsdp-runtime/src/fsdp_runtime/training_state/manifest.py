"""What a training state consists of: every tensor's pieces in the ranks' files, with sizes and checksums."""

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
from fsdp_runtime.sharded.fsync import write_synced

MANIFEST = "manifest.json"
#: Raised when the layout of the files changes.
FORMAT = 1


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor in one rank's file, under the tensor's name.

    Args:
        file: the file's name.
        start: where the box begins in the full tensor.
        shape: the box's shape.
        checksum: CRC-32 of its bytes.
    """

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: its full shape, its dtype in torch's words (``"bfloat16"``) and its pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a training state but the values.

    Args:
        step: the number that the user gave.
        world_size: how many ranks wrote it.
        mesh: the axes and sizes of the mesh that the model was on; empty for a plain model.
        tensors: by name: ``model/<name>`` and ``optimizer/<index>/<name>/<state>``.
        files: the size of every other file in bytes, and its checksum.
    """

    step: int
    world_size: int
    mesh: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, tuple[int, int]]

    def write(self, folder: Path) -> None:
        """Write the manifest; it carries a checksum of itself."""
        content = json.dumps({"format": FORMAT, **asdict(self)}).encode()
        write_synced(folder / MANIFEST, b"%08x\n%s\n" % (zlib.crc32(content), content))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a training state.

    Raises:
        CheckpointError: it is missing, damaged, or of a later version.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {folder} is no training state") from error
    checksum, _, content = text.removesuffix("\n").partition("\n")
    if f"{zlib.crc32(content.encode()):08x}" != checksum:
        raise CheckpointError(f"{path} ({len(text)} characters) is truncated or corrupt: resume from an older state")
    fields: dict[str, Any] = json.loads(content)
    if (found := fields.pop("format")) != FORMAT:
        raise CheckpointError(f"{path} has format {found}, and this version reads {FORMAT}: update fsdp-runtime")
    tensors = {name: _tensor(stored) for name, stored in fields.pop("tensors").items()}
    files = {name: (size, checksum) for name, (size, checksum) in fields.pop("files").items()}
    return Manifest(tensors=tensors, files=files, **fields)


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a contiguous tensor on the CPU."""
    return zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())) if tensor.nbytes else 0


def _tensor(stored: Mapping[str, Any]) -> StoredTensor:
    pieces = tuple(
        StoredPiece(piece["file"], tuple(piece["start"]), tuple(piece["shape"]), piece["checksum"])
        for piece in stored["pieces"]
    )
    return StoredTensor(tuple(stored["shape"]), stored["dtype"], pieces)
