"""Save non-tensor objects; a load runs no code from the file."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp_runtime.errors import CheckpointError, OptionError
from fsdp_runtime.sharded.fsync import write_and_fsync


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
