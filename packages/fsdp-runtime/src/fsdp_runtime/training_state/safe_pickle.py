"""Save objects that are not tensors of the model or optimizer; loading them runs no code from the file."""

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
    """Return the content as bytes, after checking that it can be loaded with ``weights_only=True``.

    Raises:
        OptionError: loading a value would need code to run.
    """
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


def read_object(directory: Path, name: str, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the content of a file, checked against its entry in the manifest; tensors are on the CPU.

    Raises:
        CheckpointError: the file is missing, or has another size or checksum.
    """
    path = directory / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from an older state") from error
    size, checksum = files[name]
    if (len(content), zlib.crc32(content)) != (size, checksum):
        raise CheckpointError(
            f"{path} has {len(content)} bytes, expected {size}, or its content differs from what was saved: resume "
            "from an older state"
        )
    try:
        loaded: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} would run code when loaded: save_training_state did not write it") from error
    return loaded
