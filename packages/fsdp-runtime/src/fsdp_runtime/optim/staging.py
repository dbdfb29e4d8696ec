"""Pieces of parameters on their way to the host and back, through chunks of pinned memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime.memory.host_copies import HostCopies

#: Elements of a chunk: 64 MiB of float32.
CHUNK_ELEMENTS = 2**24
#: Offsets of pieces in a chunk, in bytes.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter's shard, with the same rows of its gradient and its state."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    reads_parameter: bool  # the parameter is the master, or was written since the last step
    whole: Tensor  # the parameter of the rows


def pieces_of(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], *, reads_parameter: bool
) -> Iterator[Piece]:
    """Yield a parameter's rows in pieces of at most a chunk, or of one row."""
    tensors = {name: local_tensor(value) for name, value in state.items()}
    local, grad = local_tensor(parameter).detach(), local_tensor(gradient)
    count = local.shape[0] if local.ndim else 1
    rows = max(1, CHUNK_ELEMENTS * count // max(1, local.numel()))
    for start in range(0, count, rows) if local.numel() else ():
        part = slice(start, start + rows) if local.ndim else ...
        # A fused step counts in place: each piece has its own count.
        cut = {name: value.clone() if name == "step" else value[part] for name, value in tensors.items()}
        yield Piece(local[part], grad[part], cut, reads_parameter, parameter)


def chunks_of(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield consecutive pieces of together at most a chunk."""
    chunk: list[Piece] = []
    for piece in pieces:
        if chunk and sum(each.parameter.numel() for each in (*chunk, piece)) > CHUNK_ELEMENTS:
            yield chunk
            chunk = []
        chunk.append(piece)
    if chunk:
        yield chunk


class Staging:
    """Host memory of one chunk: gradients and parameters arrive, and the new parameters leave."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: list[tuple[Tensor, Tensor]] = []
        self._arrived: Any = None

    def fetch(self, chunk: Sequence[Piece], copies: HostCopies) -> None:
        """Begin to copy a chunk's gradients and parameters to the host; earlier copies of this memory come first."""
        self._copies = copies
        tensors = [tensor for piece in chunk for tensor in (piece.gradient, piece.parameter)]
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        if starts[-1] > self._memory.numel():
            self._copies.synchronize(self._copies.record())
            self._memory = self._copies.empty(starts[-1])
        views = [
            self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=False)
        ]
        self._views = list(zip(views[::2], views[1::2], strict=True))
        for piece, (gradient, parameter) in zip(chunk, self._views, strict=True):
            self._copies.copy(gradient, piece.gradient)
            if piece.reads_parameter:
                self._copies.copy(parameter, piece.parameter)
        self._arrived = self._copies.record()

    def arrived(self) -> list[tuple[Tensor, Tensor]]:
        """Return the gradient and the parameter of each piece; the host waits for them."""
        self._copies.synchronize(self._arrived)
        return self._views

    def send(self, chunk: Sequence[Piece]) -> None:
        """Begin to copy the parameters to the device."""
        for piece, (_, parameter) in zip(chunk, self._views, strict=True):
            self._copies.copy(piece.parameter, parameter)
