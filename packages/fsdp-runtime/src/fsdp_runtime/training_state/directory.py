"""Directories of training states: the newest state, atomic commits beside other jobs, manifests and checked files.

A state takes effect when its complete directory gets its name.  The index records the order.  It is written after the
rename, so states that the index lacks are newer than its last state.  A writer of the index reads the directory again
until both agree, so the last writer lists every state.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import pickle
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fsdp_runtime.errors import CheckpointError, OptionError
from fsdp_runtime.sharded.saved_files import discard, is_file_name, move_into_place, unused_path, write_and_fsync
from tp_plans.boxes import Box, volume

T = TypeVar("T")
MANIFEST = "manifest.json"
#: Version of the files' layout.
FORMAT = 2
#: Names of the states, in the order of saving.
INDEX = "training_states.json"

logger = logging.getLogger(__name__)
#: The states that this process may remove, by directory: the states at its first access, and its own states.
_removable: dict[str, set[str]] = {}


def newest_state(directory: Path) -> Path:
    """Return the directory of the state to resume from: ``directory`` itself, or the newest state in it."""
    if (directory / MANIFEST).is_file():
        with suppress(CheckpointError):  # a damaged index does not matter here
            _removable_states(directory.absolute().parent)
        return directory
    if not (saved := _saved_states(directory)):
        raise CheckpointError(f"{directory} holds no training state: give the directory that one was saved to")
    _removable_states(directory)
    return directory / saved[-1]


def commit(work: Path, step: int, keep: int | None) -> Path:
    """Put a complete state into effect by one rename, then remove older states beyond ``keep``."""
    directory = work.parent
    removable = _removable_states(directory)
    final = _place(work, step)
    removable.add(final.name)
    try:
        while (names := _saved_states(directory)) != _listed(directory):
            new = unused_path(directory)
            try:
                new.write_bytes((json.dumps({"states": names}, indent=2) + "\n").encode())
                move_into_place(new, directory / INDEX)
            finally:
                new.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is saved; %s could not be written (%s); the next save writes it", final, INDEX, error)
    if keep is not None:
        older = [name for name in _saved_states(directory) if name in removable and name != final.name]
        for name in older[: max(len(older) - keep, 0)]:
            discard(directory / name)
    return final


def _removable_states(directory: Path) -> set[str]:
    """Return the states that this process may remove, without states that another job saves meanwhile."""
    path = os.path.realpath(directory)
    if path not in _removable:
        _removable[path] = set(_saved_states(directory))
    return _removable[path]


def _saved_states(directory: Path) -> list[str]:
    """Return the names of the states' directories in the order of saving."""
    listed = [name for name in _listed(directory) if (directory / name / MANIFEST).is_file()]
    others = []
    for manifest in directory.glob(f"[!.]*/{MANIFEST}"):
        if manifest.parent.name not in listed:
            with suppress(FileNotFoundError):  # another job removed the state
                others.append((manifest.stat().st_mtime_ns, manifest.parent.name))
    return [*listed, *(name for _, name in sorted(others))]


def _listed(directory: Path) -> list[str]:
    index = directory / INDEX
    try:
        names = list(json.loads(index.read_text(encoding="utf-8"))["states"])
        if outside := [name for name in names if not is_file_name(name)]:
            raise ValueError(f"{outside[0]!r} is not the name of a directory in {directory}")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is damaged ({error!r}): pass the directory of one state in {directory}"
        ) from error
    return names


def _place(work: Path, step: int) -> Path:
    """Rename to ``step-00000012``, with a number appended if a rolled-back run or another job has saved that step."""
    usual = work.with_name(f"step-{step:08d}")
    final, number = usual, 1
    while True:
        try:
            if not final.exists():
                move_into_place(work, final)
                return final
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another job took the name just now
                raise
        number += 1
        final = usual.with_name(f"{usual.name}-{number}")


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
    full, parts = _numbers(shape), tuple(_chunk(**_typed(chunk, dict)) for chunk in _typed(chunks, list))
    if any(stop > size for chunk in parts for (_, stop), size in zip(chunk.box, full, strict=True)):
        raise ValueError(f"a chunk of {name} is not inside of its shape {full}")
    if sum(volume(chunk.box) for chunk in parts) != math.prod(full):
        raise ValueError(f"its chunks lack a part of {name}, of shape {full}")
    return StoredTensor(full, dtype, parts)


def _chunk(file: Any, start: Any, shape: Any, checksum: Any) -> StoredChunk:
    return StoredChunk(_file(file), _numbers(start), _numbers(shape), _number(checksum))


def _file(name: Any) -> str:
    if not is_file_name(name):
        raise ValueError(f"it names {name!r}, which is not a file in its directory")
    return str(name)


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


# Files of other values: a load runs no code from them.


def serialize(content: dict[str, Any]) -> bytes:
    """Return the content as bytes, after a check that ``weights_only=True`` can load the bytes."""
    for name, value in content.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except (pickle.PickleError, TypeError, AttributeError, RuntimeError) as error:
            raise OptionError(
                f"{name} cannot be saved in a form that is safe to load: use only tensors, numbers, strings, lists, "
                f"tuples and dicts ({str(error).splitlines()[0]})"
            ) from error
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def write_object(directory: Path, name: str, content: bytes) -> dict[str, tuple[int, int]]:
    """Write one file; return its entry in the manifest."""
    write_and_fsync(directory / name, content)
    return {name: (len(content), zlib.crc32(content))}


def read_object(
    directory: Path, name: str, files: Mapping[str, tuple[int, int]], kinds: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a file's content, checked against the manifest; it must have the keys and types of ``kinds``."""
    path = directory / name
    if name not in files:
        raise CheckpointError(f"the manifest in {directory} lacks {name}: resume from an older state")
    size, checksum = files[name]
    try:
        nbytes = path.stat().st_size
        content = path.read_bytes() if nbytes == size else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from an older state") from error
    if nbytes != size or zlib.crc32(content) != checksum:
        raise CheckpointError(
            f"{path} has {nbytes} bytes, expected {size}, or its content differs from the saved content: resume "
            "from an older state"
        )
    try:
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} would run code when loaded: save_training_state did not write it") from error
    except Exception as error:  # a damaged archive can raise any exception in torch
        raise CheckpointError(f"{path} cannot be loaded ({error!r:.200}): resume from an older state") from error
    if not isinstance(loaded, dict) or any(not isinstance(loaded.get(key), kind) for key, kind in kinds.items()):
        raise CheckpointError(f"{path} lacks one of {', '.join(kinds)}: resume from an older state")
    return loaded
