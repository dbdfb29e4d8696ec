"""Reading the tensors of a training state, a slice at a time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdp_runtime.errors import CheckpointError
from fsdp_runtime.sharded.chunks import Box, Piece, covers, fill
from fsdp_runtime.training_state.manifest import Manifest, StoredPiece, checksum


class StateReader:
    """The files of a training state, opened one by one as they are needed.

    Raises:
        CheckpointError: a file that the manifest lists is missing, or the manifest does not have all of a tensor.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._open_files = ExitStack()
        self._pieces = {
            name: [_piece(name, piece) for piece in stored.pieces] for name, stored in manifest.tensors.items()
        }
        wanted = {piece.file for stored in manifest.tensors.values() for piece in stored.pieces} | set(manifest.files)
        if lost := sorted(name for name in wanted if not (folder / name).is_file()):
            raise CheckpointError(f"{folder} lacks {', '.join(lost)}: resume from an older state")
        for name, stored in manifest.tensors.items():
            if not covers(self._pieces[name], stored.shape):
                raise CheckpointError(f"{folder} does not have all of {name}, of shape {stored.shape}")

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._files.clear()
        self._open_files.close()

    def fill(self, name: str, tensor: Tensor) -> None:
        """Fill this rank's part of a tensor."""
        fill(tensor, self._pieces[name], lambda source, box: self._read(source, name, box))

    def verify(self, numbers: Iterable[int]) -> None:
        """Compare the checksums of some of the tensors, by their place in the manifest.

        Raises:
            CheckpointError: a file is truncated, or its bytes are not those that were saved.
        """
        names = list(self.manifest.tensors)
        for name in (names[number] for number in numbers):
            for piece in self.manifest.tensors[name].pieces:
                whole = tuple(slice(0, size) for size in piece.shape)
                tensor = self._read(piece.file, name, whole)
                if tuple(tensor.shape) != piece.shape or checksum(tensor.contiguous()) != piece.checksum:
                    raise CheckpointError(
                        f"{self._folder / piece.file}: {name} is not what was saved: resume from an older state"
                    )

    def _read(self, file: str, name: str, box: Box) -> Tensor:
        path = self._folder / file
        try:
            if file not in self._files:
                self._files[file] = self._open_files.enter_context(safe_open(path, framework="pt"))
            tensor: Tensor = self._files[file].get_slice(name)[box or ...]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or corrupt, or lacks {name} ({error}): resume from an older state"
            ) from error
        return tensor


def _piece(name: str, stored: StoredPiece) -> Piece:
    target = tuple(slice(first, first + size) for first, size in zip(stored.start, stored.shape, strict=True))
    return Piece(stored.file, target, (0,) * len(stored.shape), tuple(range(len(stored.shape))))
