"""Read the tensors of a training state, a slice at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded.chunks import Chunk, Slices, fill_local
from fsdp_runtime.sharded.safetensors_io import SafetensorsReader
from fsdp_runtime.training_state.manifest import MANIFEST, Manifest, StoredChunk, checksum


class StateReader:
    """The files of a training state, each opened at its first use."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._directory = directory
        self._reader = SafetensorsReader("resume from an older state")
        self._chunks = {name: [_chunk(chunk) for chunk in stored.chunks] for name, stored in manifest.tensors.items()}
        needed = {chunk.file for stored in manifest.tensors.values() for chunk in stored.chunks} | set(manifest.files)
        if missing := sorted(name for name in needed if not (directory / name).is_file()):
            raise CheckpointError(f"{directory} lacks {', '.join(missing)}: resume from an older state")
        inside = directory.resolve()
        if outside := sorted(name for name in (MANIFEST, *needed) if (directory / name).resolve().parent != inside):
            raise CheckpointError(
                f"{directory / outside[0]} is a link to a file outside of {directory}: copy the file into it"
            )
        _require_room(directory, manifest)

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._reader.close()

    def fill(self, name: str, tensor: Tensor) -> None:
        """Fill this rank's shard of a tensor."""
        fill_local(tensor, self._chunks[name], lambda file, slices: self._read(self._directory / file, name, slices))

    def _read(self, file: Path, name: str, slices: Slices = ()) -> Tensor:
        tensor = self._reader.read(file, name, slices)
        if (found := str(tensor.dtype).removeprefix("torch.")) != (saved := self.manifest.tensors[name].dtype):
            raise CheckpointError(f"{file}: {name} is {found}, and {saved} was saved: resume from an older state")
        return tensor

    def verify(self, indices: Iterable[int]) -> None:
        """Check the checksums of tensors, given by their index in the manifest."""
        names = list(self.manifest.tensors)
        for name in (names[index] for index in indices):
            for chunk in self.manifest.tensors[name].chunks:
                file = self._directory / chunk.file
                tensor = self._read(file, name)
                if tuple(tensor.shape) != chunk.shape or checksum(tensor.contiguous()) != chunk.checksum:
                    raise CheckpointError(f"{file}: {name} differs from what was saved: resume from an older state")


def _require_room(directory: Path, manifest: Manifest) -> None:
    """Raise unless the files are as large as the tensors of the manifest: as much is going to be allocated."""
    nbytes: Counter[str] = Counter()
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            nbytes[chunk.file] += math.prod(chunk.shape) * getattr(torch, tensor.dtype).itemsize
    for name, needed in nbytes.items():
        if (found := (directory / name).stat().st_size) < needed:
            raise CheckpointError(
                f"{directory / name} has {found} bytes, and its tensors {needed}: it is truncated or corrupt; resume "
                "from an older state"
            )


def _chunk(stored: StoredChunk) -> Chunk:
    target = tuple(slice(first, first + size) for first, size in zip(stored.start, stored.shape, strict=True))
    return Chunk(stored.file, target, (0,) * len(stored.shape), tuple(range(len(stored.shape))))
