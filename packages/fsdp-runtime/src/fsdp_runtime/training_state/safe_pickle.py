"""What is no tensor of the model or optimizer: written by ``torch.save``, read back without running any code."""

from __future__ import annotations

import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch

from fsdp_runtime.errors import CheckpointError, OptionError
from fsdp_runtime.sharded.fsync import write_synced


def encoded(content: dict[str, Any]) -> bytes:
    """The content as bytes, once it is known that they can be read back.

    Raises:
        OptionError: something in it could only be read by running code from the file.
    """
    buffer = io.BytesIO()
    for name, value in content.items():
        alone = io.BytesIO()
        try:
            torch.save(value, alone)
            alone.seek(0)
            torch.load(alone, weights_only=True)
        except (pickle.PickleError, TypeError, AttributeError, RuntimeError) as error:
            raise OptionError(
                f"{name} cannot be saved so that it is safe to load: keep to tensors, numbers, strings, lists, tuples "
                f"and dicts ({str(error).splitlines()[0]})"
            ) from error
    torch.save(content, buffer)
    return buffer.getvalue()


def write_object(folder: Path, name: str, content: bytes) -> dict[str, tuple[int, int]]:
    """Write one file; its entry in the manifest."""
    write_synced(folder / name, content)
    return {name: (len(content), zlib.crc32(content))}


def read_object(folder: Path, name: str, files: Any) -> dict[str, Any]:
    """The content of a file, checked against its entry in the manifest; tensors come on the CPU.

    Raises:
        CheckpointError: the file is missing, or has another size or checksum.
    """
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from an older state") from error
    size, checksum = files[name]
    if (len(content), zlib.crc32(content)) != (size, checksum):
        raise CheckpointError(
            f"{path} has {len(content)} bytes of {size} or other content than was saved: resume from an older state"
        )
    try:
        loaded: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} wants to run code when it is loaded: it is no file of save_training_state"
        ) from error
    return loaded
