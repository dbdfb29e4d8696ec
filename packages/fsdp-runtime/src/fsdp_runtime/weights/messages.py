"""Parts of stored tensors in messages between ranks: their places, their views, and the tensors that they are of."""

from __future__ import annotations

from torch import Tensor

from fsdp_runtime.sharded.rank_boxes import block_view
from fsdp_runtime.weights.export import ExportedTensor
from fsdp_runtime.weights.file_plan import Part
from tp_plans.transfer import Box, box_shape, volume

#: Alignment of a part in a message, a multiple of every dtype's size.
_ALIGNMENT = 16


def message_bytes(item: ExportedTensor, box: Box) -> int:
    """Return the bytes that a box of a tensor takes in a message."""
    return -(-_bytes(item, box) // _ALIGNMENT) * _ALIGNMENT


def in_message(message: Tensor, offset: int, item: ExportedTensor, box: Box) -> Tensor:
    """Return the box that lies in a message, ``[bytes]`` uint8, from ``offset`` on, as a view of the box's shape."""
    return message[offset : offset + _bytes(item, box)].view(item.dtype).view(box_shape(box))


def local_view(local: Tensor, name: str, part: Part) -> Tensor:
    """Return a view of a part in the local tensor of its piece; errors call the tensor by ``name``."""
    block = part.piece.block
    return block_view({block.local: local}, name, block, part.box)


def _bytes(item: ExportedTensor, box: Box) -> int:
    return volume(box) * item.dtype.itemsize
