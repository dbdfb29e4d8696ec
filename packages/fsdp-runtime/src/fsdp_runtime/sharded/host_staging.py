"""Copies of tensors in host memory: a save writes the copies while training changes the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from fsdp_runtime.sharded.safetensors_io import SafetensorsWriter

T = TypeVar("T")
#: Bytes of a piece of host memory; pinned memory comes in powers of two.
_SLAB = 2**26


class HostStaging:
    """Bytes of tensors, copied to host memory; the memory is pinned for tensors on an accelerator."""

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}
        self.nbytes = 0

    def copy(self, tensor: Tensor) -> list[Tensor]:
        """Start to copy a tensor; return its bytes in pieces of uint8, complete after :meth:`synchronize`."""
        flat, pieces = flat_bytes(tensor.detach()), []
        while flat.numel():
            piece = self._take(flat.numel(), flat.device.type)
            piece.copy_(flat[: len(piece)], non_blocking=True)
            pieces.append(piece)
            flat = flat[len(piece) :]
        return pieces

    def synchronize(self) -> None:
        """Return once every copy is complete; drop the unused memory."""
        if any(kind != "cpu" for kind in self._room):
            torch.accelerator.synchronize()
        self._room.clear()

    def _take(self, nbytes: int, kind: str) -> Tensor:
        """Return unused host memory: at most ``nbytes``, at least one byte."""
        room = self._room.pop(kind, None)
        if room is None:
            room = torch.empty(_SLAB, dtype=torch.uint8, pin_memory=kind != "cpu")
            self.nbytes += _SLAB
        if len(room) > nbytes:
            self._room[kind] = room[nbytes:]
        return room[:nbytes]


class StagedWriter:
    """Pending writes to a file, in host memory; :meth:`finish` writes them."""

    def __init__(self, file: SafetensorsWriter, staging: HostStaging) -> None:
        self._file, self._staging = file, staging
        self._writes: list[tuple[str, int, list[Tensor]]] = []

    def write(self, name: str, tensor: Tensor, start: int = 0) -> int:
        """Stage a :meth:`SafetensorsWriter.write`, with a copy of the tensor; return the tensor's bytes."""
        self._writes.append((name, start * tensor.itemsize, self._staging.copy(tensor)))
        return tensor.nbytes

    def finish(self) -> None:
        """Write the copies, and close the file once they are on the disk."""
        for name, start, pieces in drained(self._writes):
            for piece in drained(pieces):
                start += self._file.write(name, piece, start)
        self._file.finish()


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, ``[bytes]`` uint8."""
    flat = tensor.contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def drained(items: list[T]) -> Iterator[T]:
    """Yield the items of a list in order, and empty the list."""
    items.reverse()
    while items:
        yield items.pop()
