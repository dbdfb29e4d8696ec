"""Parts of stored tensors in messages between ranks: their places, their views, and their local tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fsdp_runtime.sharded.rank_boxes import block_view
from fsdp_runtime.weights.export import ExportedTensor
from fsdp_runtime.weights.file_plan import Part
from tp_plans.transfer import Box, box_shape, volume

#: Alignment of a part in a message, a multiple of every dtype's size.
_ALIGNMENT = 16

#: The most bytes that a rank holds for one exchange, however large its bucket is: enough for the network, and small
#: enough to stay allocated and cached from one exchange to the next.
EXCHANGED_BYTES = 2**26


class ReusedMemory:
    """Memory for tensors that live one after another; it grows to the largest use and is then reused."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def bytes_of(self, nbytes: int) -> Tensor:
        """Return ``[nbytes]`` uint8; earlier results become invalid."""
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:nbytes]

    def messages(self, sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """Return a message of the given bytes for each rank; earlier results become invalid."""
        parts = torch.split(self.bytes_of(sum(sizes.values())), list(sizes.values()))
        return dict(zip(sizes, parts, strict=True))


def message_bytes(item: ExportedTensor, box: Box) -> int:
    """Return the bytes that a box of a tensor takes in a message."""
    return -(-_bytes(item, box) // _ALIGNMENT) * _ALIGNMENT


def in_message(message: Tensor, offset: int, item: ExportedTensor, box: Box) -> Tensor:
    """Return the box at ``offset`` of a message, ``[bytes]`` uint8, as a view of the box's shape."""
    return message[offset : offset + _bytes(item, box)].view(item.dtype).view(box_shape(box))


def local_view(local: Tensor, name: str, part: Part) -> Tensor:
    """Return a view of a part in the local tensor of its piece; errors call the tensor by ``name``."""
    block = part.piece.block
    return block_view({block.local: local}, name, block, part.box)


def _bytes(item: ExportedTensor, box: Box) -> int:
    return volume(box) * item.dtype.itemsize
