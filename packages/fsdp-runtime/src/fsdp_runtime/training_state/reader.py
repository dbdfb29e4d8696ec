"""Read the tensors of a training state, a slice at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from torch import Tensor

from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded.chunks import Chunk, fill_local, is_complete
from fsdp_runtime.sharded.paths import is_file_name
from fsdp_runtime.sharded.safetensors_io import SafetensorsReader
from fsdp_runtime.training_state.manifest import Manifest, StoredChunk, checksum


class StateReader:
    """The files of a training state, each opened at its first use.

    Raises:
        CheckpointError: a file that the manifest lists is missing, or the manifest lacks a part of a tensor.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._directory = directory
        self._reader = SafetensorsReader("resume from an older state")
        self._chunks = {name: [_chunk(chunk) for chunk in stored.chunks] for name, stored in manifest.tensors.items()}
        needed = {chunk.file for stored in manifest.tensors.values() for chunk in stored.chunks} | set(manifest.files)
        if outside := sorted(str(name) for name in needed if not is_file_name(name)):
            raise CheckpointError(
                f"{directory} names {outside[0]!r}, which is not a file in it: resume from an older state"
            )
        if missing := sorted(name for name in needed if not (directory / name).is_file()):
            raise CheckpointError(f"{directory} lacks {', '.join(missing)}: resume from an older state")
        for name, stored in manifest.tensors.items():
            if not is_complete(self._chunks[name], stored.shape):
                raise CheckpointError(
                    f"{directory} lacks a part of {name}, of shape {stored.shape}: resume from an older state"
                )

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._reader.close()

    def fill(self, name: str, tensor: Tensor) -> None:
        """Fill this rank's shard of a tensor."""
        fill_local(
            tensor,
            self._chunks[name],
            lambda file, slices: self._reader.read(self._directory / file, name, slices),
        )

    def verify(self, indices: Iterable[int]) -> None:
        """Check the checksums of tensors, given by their index in the manifest.

        Raises:
            CheckpointError: a file is truncated, or its bytes differ from the saved ones.
        """
        names = list(self.manifest.tensors)
        for name in (names[index] for index in indices):
            for chunk in self.manifest.tensors[name].chunks:
                file = self._directory / chunk.file
                tensor = self._reader.read(file, name)
                if tuple(tensor.shape) != chunk.shape or checksum(tensor.contiguous()) != chunk.checksum:
                    raise CheckpointError(f"{file}: {name} differs from what was saved: resume from an older state")


def _chunk(stored: StoredChunk) -> Chunk:
    target = tuple(slice(first, first + size) for first, size in zip(stored.start, stored.shape, strict=True))
    return Chunk(stored.file, target, (0,) * len(stored.shape), tuple(range(len(stored.shape))))
