"""Read a Hugging Face safetensors checkpoint: its index, its tensors' headers, and slices of its tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded.collectives import ModelRanks, raise_on_all
from fsdp_runtime.sharded.safetensors_io import SafetensorsReader
from fsdp_runtime.sharded.saved_files import is_file_name, machine, require_path
from fsdp_runtime.weights.companion_files import COMPANIONS
from tp_plans.boxes import Box, full_box

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class HubTensor:
    """Header of a checkpoint's tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # in safetensors' notation, as "BF16"


class HubCheckpoint(SafetensorsReader):
    """The tensors of a Hugging Face checkpoint; opening it reads headers only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__("download or save it again")
        self.bytes_read = 0
        self.stored: Mapping[str, Any] = {}  # quantized weights, each in several tensors of the files
        self.folder: Path | None = None  # the checkpoint's folder; ``None`` if ``path`` is a file of another name
        try:
            self.tensors: Mapping[str, HubTensor] = self._read_headers(path)
            self._in_files: Mapping[str, HubTensor] = self.tensors
        except BaseException:
            self.close()
            raise

    def show(self, tensors: Mapping[str, HubTensor], stored: Mapping[str, Any]) -> None:
        """Show tensors in the place of the tensors in the files; ``stored`` computes the values of some."""
        self._in_files, self.tensors, self.stored = self.tensors, tensors, stored

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return a box of a tensor, on the CPU, in the checkpoint's dtype; other bytes are not read."""
        if (weight := self.stored.get(name)) is None:
            return self.read_part(name, box)
        values: Tensor = weight.values(self.read_part, full_box(self.tensors[name].shape) if box is None else box)
        return values

    def read_codes(self, name: str, box: Box, fmt: Any) -> Tensor | None:
        """Return a box of a quantized weight in the bytes of a packed format, ``None`` without such codes."""
        weight = self.stored.get(name)
        return None if weight is None else weight.packed(self.read_part, box, fmt)

    def read_part(self, name: str, box: Box | None = None) -> Tensor:
        """Return a box of a tensor of the files."""
        tensor = self.read_box(self._in_files[name].file, name, box)
        self.bytes_read += tensor.nbytes
        return tensor

    def _read_headers(self, path: str | os.PathLike[str]) -> dict[str, HubTensor]:
        """Return all headers of one checkpoint; its files stay open and may be replaced on disk."""
        while True:
            location = _resolve(path)
            version = _file_version(location)
            self.folder = location.parent if location.name in (SINGLE_FILE, INDEX_FILE) else None
            try:
                return self._headers(location)
            except CheckpointError:
                if version is not None and _file_version(location) == version:
                    raise
                self.close()  # another process has saved a checkpoint meanwhile

    def _headers(self, location: Path) -> dict[str, HubTensor]:
        if location.name != INDEX_FILE:
            return self._header(location)
        by_name = _read_index(location)
        _require_inside(location, set(by_name.values()))
        files = {name: self._header(location.parent / name) for name in sorted(set(by_name.values()))}
        missing = [f"{name} in {file}" for name, file in by_name.items() if name not in files[file]]
        if missing:
            raise CheckpointError(
                f"{location} lists {len(missing)} tensors that their files do not hold: {', '.join(missing[:8])}: "
                "the index and the files are of different checkpoints; download or save them again"
            )
        return {name: files[file][name] for name, file in by_name.items()}

    def _header(self, file: Path) -> dict[str, HubTensor]:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is incomplete; download or save it again")
        return {name: HubTensor(file, shape, dtype) for name, (shape, dtype, _) in self.headers(file).items()}


#: Attempts to open the same checkpoint on all ranks while another process replaces it.
_ATTEMPTS = 5


def open_on_all(path: str | os.PathLike[str], ranks: ModelRanks) -> HubCheckpoint:
    """Open one checkpoint on all ranks; retry if another process replaces the files meanwhile."""
    for _ in range(_ATTEMPTS):
        with ExitStack() as opened:
            with raise_on_all(ranks) as step:
                checkpoint = opened.enter_context(HubCheckpoint(path))
                step.value = machine(), checkpoint.identity()
            if _are_one(step.values.values()):
                opened.pop_all()
                return checkpoint
    raise CheckpointError(
        f"{os.fspath(path)} is not the same checkpoint on every rank, {_ATTEMPTS} times: another job saves to it, or "
        "hosts have different copies of it; load it when it is complete, from the same files on every host"
    )


def _are_one(identities: Collection[tuple[str, Any]]) -> bool:
    """Whether ranks have opened the same files; each host may have a copy on its disk."""
    contents = {tuple(file[:3] for file in files) for _, files in identities}
    copies = {(host, tuple(file[3] for file in files)) for host, files in identities}
    return len(contents) == 1 and len(copies) == len({host for host, _ in copies})


def _resolve(path: str | os.PathLike[str]) -> Path:
    """Return the safetensors file or index to read; in a directory with both, the file, as in ``transformers``."""
    location = require_path("path", path)
    if location.is_file():
        return location
    if not location.is_dir():
        location = _from_hub(os.fspath(path))
    for name in (SINGLE_FILE, INDEX_FILE) * 5:  # a save may replace the file by an index meanwhile
        if (location / name).is_file():
            return location / name
    raise CheckpointError(f"{location} holds neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors are read")


def _file_version(file: Path) -> tuple[int, ...] | None:
    """Return a value that changes when a file is replaced, or ``None`` if the file does not exist."""
    try:
        with file.open("rb") as opened:  # a network file system asks its server when a file is opened
            status = os.fstat(opened.fileno())
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _from_hub(repository: str) -> Path:
    problem = f"{repository!r} is not a directory"
    if os.path.isabs(repository) or repository.count("/") > 1 or repository.startswith("."):
        raise CheckpointError(f"{problem}: give one that holds {SINGLE_FILE} or {INDEX_FILE}, or a hub id")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise CheckpointError(f"{problem}, and a hub id needs huggingface_hub: pip install huggingface_hub") from error
    weights = ["*.safetensors", INDEX_FILE]
    # The cache may hold only a config or a tokenizer, and ``snapshot_download`` returns a cached folder even if files
    # are missing. Without a network the cached weights suffice.
    failure: Exception | None = None
    for patterns, local in (([*weights, *COMPANIONS], True), ([*weights, *COMPANIONS], False), (weights, True)):
        try:
            folder = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=local))
        except (OSError, ValueError) as error:
            if not (local and isinstance(error, LocalEntryNotFoundError)):
                failure = error
            continue
        complete = patterns is weights or (folder / "generation_config.json").is_file()
        if not local or (complete and any(folder.glob("*.safetensors"))):
            return folder
    raise CheckpointError(f"{problem}, and the hub has no such checkpoint or cannot be reached: {failure}") from failure


def _read_index(file: Path) -> dict[str, str]:
    try:
        by_name: dict[str, str] = dict(json.loads(file.read_text(encoding="utf-8"))["weight_map"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not an index of safetensors files ({error!r}): save it again") from error
    for name, target in by_name.items():
        if not is_file_name(target):
            raise CheckpointError(
                f"{file} maps {name} to {target!r}, which is not the name of a file in its directory: save it again"
            )
    return by_name


def _require_inside(index: Path, names: set[str]) -> None:
    """Refuse symbolic links that leave the directory of an index, except links of the hub's cache to its blobs."""
    directory = index.parent.resolve()
    allowed = [directory]
    if directory.parent.name == "snapshots":  # models--<owner>--<name>/snapshots/<commit>/<link to ../../blobs/...>
        allowed.append(directory.parent.parent / "blobs")
    for name in sorted(names):
        file = (directory / name).resolve()
        if file.parent not in allowed:
            raise CheckpointError(
                f"{index} names {name}, a link to {file}, outside {directory}: copy the file into the directory"
            )
