"""Reading a Hugging Face checkpoint: which file holds which tensor, and slices of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdp_runtime.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint as its file's header describes it; ``dtype`` in safetensors' words (``"BF16"``)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a checkpoint; opening it reads headers only.

    Args:
        path: a directory with ``model.safetensors`` or ``model.safetensors.index.json``, one safetensors file, or
            a hub id (resolved by ``huggingface_hub``, its local cache first, where that is installed).

    Raises:
        CheckpointError: nothing is found there, or a file is missing, truncated or corrupt.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.bytes_read = 0
        self._open_files = ExitStack()
        self._files: dict[Path, Any] = {}
        try:
            self.tensors: Mapping[str, StoredTensor] = self._headers(_resolve(path))
        except BaseException:
            self._open_files.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._files.clear()
        self._open_files.close()

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """One slice a dim of a tensor, on the CPU, in the checkpoint's dtype; no other bytes are read.

        Raises:
            CheckpointError: the file cannot be read.
        """
        file = self.tensors[name].file
        try:
            tensor: Tensor = self._files[file].get_slice(name)[part or ...]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot read tensor {name}: {error}") from error
        self.bytes_read += tensor.nbytes
        return tensor

    def _headers(self, location: Path) -> dict[str, StoredTensor]:
        if location.name != INDEX_FILE:
            return self._header(location)
        by_name = _read_index(location)
        files = {name: self._header(location.parent / name) for name in sorted(set(by_name.values()))}
        lost = [f"{name} in {file}" for name, file in by_name.items() if name not in files[file]]
        if lost:
            raise CheckpointError(
                f"{location} lists {len(lost)} tensors that their files do not hold: {', '.join(lost[:8])}: "
                "the index and the files are of different checkpoints; download or save them again"
            )
        return {name: files[file][name] for name, file in by_name.items()}

    def _header(self, file: Path) -> dict[str, StoredTensor]:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is incomplete; download or save it again")
        try:
            opened = self._open_files.enter_context(safe_open(file, framework="pt"))
            names = opened.keys()
            slices = {name: opened.get_slice(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} ({file.stat().st_size} bytes) is truncated or corrupt ({error}): download or save it again"
            ) from error
        self._files[file] = opened
        return {
            name: StoredTensor(file, tuple(stored.get_shape()), stored.get_dtype()) for name, stored in slices.items()
        }


def _resolve(path: str | os.PathLike[str]) -> Path:
    """The safetensors file or index to read; where a directory has both, the file, as ``transformers`` does."""
    location = Path(path)
    if location.is_file():
        return location
    if not location.is_dir():
        location = _from_hub(os.fspath(path))
    for name in (SINGLE_FILE, INDEX_FILE):
        if (location / name).is_file():
            return location / name
    raise CheckpointError(f"{location} holds neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors are read")


def _from_hub(repository: str) -> Path:
    problem = f"{repository!r} is no directory"
    if os.path.isabs(repository) or repository.count("/") > 1 or repository.startswith("."):
        raise CheckpointError(f"{problem}: give one that holds {SINGLE_FILE} or {INDEX_FILE}, or a hub id")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise CheckpointError(f"{problem}, and a hub id needs huggingface_hub: pip install huggingface_hub") from error
    wanted = ["*.safetensors", INDEX_FILE]
    try:
        try:
            return Path(snapshot_download(repository, allow_patterns=wanted, local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(snapshot_download(repository, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{problem}, and the hub has no such checkpoint within reach: {error}") from error


def _read_index(file: Path) -> dict[str, str]:
    try:
        by_name: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return dict(by_name.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no index of safetensors files ({error!r}): save it again") from error
