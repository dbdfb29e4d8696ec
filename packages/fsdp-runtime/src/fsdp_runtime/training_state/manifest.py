"""The manifest of a training state: every tensor's chunks in the ranks' files, with sizes and checksums."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded.fsync import write_and_fsync
from fsdp_runtime.sharded.paths import is_file_name
from tp_plans.boxes import Box, volume

T = TypeVar("T")
MANIFEST = "manifest.json"
#: Version of the files' layout.
FORMAT = 2


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor in one rank's file, under the tensor's name."""

    file: str
    start: tuple[int, ...]  # index of the first element in the full tensor
    shape: tuple[int, ...]
    checksum: int  # CRC-32 of the bytes

    @property
    def box(self) -> Box:
        """The chunk's box of the full tensor."""
        return tuple((first, first + size) for first, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: its full shape, its dtype in torch's notation (``"bfloat16"``) and its chunks."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class Manifest:
    """Metadata of a training state: step, mesh, tensors and files, without values."""

    step: int  # the user's step number
    world_size: int  # number of ranks that wrote the state
    mesh: Mapping[str, int]  # axes and sizes; empty for a plain model
    tensors: Mapping[str, StoredTensor]  # ``model/<name>`` and ``optimizer/<index>/<name>/<state>``
    files: Mapping[str, tuple[int, int]]  # size and checksum of every other file

    def write(self, directory: Path) -> None:
        """Write the manifest, preceded by its own checksum."""
        content = json.dumps({"format": FORMAT, **asdict(self)}).encode()
        write_and_fsync(directory / MANIFEST, b"%08x\n%s\n" % (zlib.crc32(content), content))


def read_manifest(directory: Path) -> tuple[Manifest, str]:
    """Return the manifest of a training state, and its checksum."""
    path = directory / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {directory} is not a training state") from error
    checksum, _, content = text.removesuffix("\n").partition("\n")
    if f"{zlib.crc32(content.encode()):08x}" != checksum:
        raise CheckpointError(f"{path} ({len(text)} characters) is truncated or corrupt: resume from an older state")
    try:
        fields = _typed(json.loads(content), dict)
        if (version := fields.pop("format")) != FORMAT:
            raise CheckpointError(
                f"{path} has format {version}, and this version of fsdp-runtime reads format {FORMAT}: resume with the "
                "version that saved it"
            )
        return _manifest(**fields), checksum
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not what save_training_state writes ({error}): resume from an older state"
        ) from error


# Parsing of a manifest file: every value is checked, also after a correct checksum.


def _manifest(step: Any, world_size: Any, mesh: Any, tensors: Any, files: Any) -> Manifest:
    return Manifest(
        step=_number(step),
        world_size=_number(world_size, 1),
        mesh={name: _number(size, 1) for name, size in _typed(mesh, dict).items()},
        tensors={name: _tensor(name, **_typed(stored, dict)) for name, stored in _typed(tensors, dict).items()},
        files={_file(name): (_number(size), _number(crc)) for name, (size, crc) in _typed(files, dict).items()},
    )


def _tensor(name: str, shape: Any, dtype: Any, chunks: Any) -> StoredTensor:
    if not isinstance(getattr(torch, _typed(dtype, str), None), torch.dtype):
        raise ValueError(f"{name} has the dtype {dtype!r}")
    parts = tuple(_chunk(**_typed(chunk, dict)) for chunk in _typed(chunks, list))
    stored = StoredTensor(_numbers(shape), dtype, parts)
    if not all(_is_inside(chunk, stored.shape) for chunk in stored.chunks):
        raise ValueError(f"a chunk of {name} is not inside of its shape {stored.shape}")
    if sum(volume(chunk.box) for chunk in parts) != math.prod(stored.shape):
        raise ValueError(f"its chunks lack a part of {name}, of shape {stored.shape}")
    return stored


def _chunk(file: Any, start: Any, shape: Any, checksum: Any) -> StoredChunk:
    return StoredChunk(_file(file), _numbers(start), _numbers(shape), _number(checksum))


def _file(name: Any) -> str:
    if not is_file_name(name):
        raise ValueError(f"it names {name!r}, which is not a file in its directory")
    return str(name)


def _is_inside(chunk: StoredChunk, shape: tuple[int, ...]) -> bool:
    return len(chunk.start) == len(chunk.shape) == len(shape) and all(
        stop <= full for (_, stop), full in zip(chunk.box, shape, strict=True)
    )


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_number(value) for value in _typed(values, list))


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{value!r:.80} is not a whole number of at least {least}")
    return value


def _typed(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.80} is not a {kind.__name__}")
    return value
