"""Views of local tensors as parts of checkpoint tensors, and a rank's tensors on both sides of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sharded import block_view, inside
from fsdp_runtime.sync.schedule import Message
from fsdp_runtime.weights import DequantizedTensor
from tp_plans.boxes import Box, box_shape
from tp_plans.transfer import BlockTransfer, TransferLayout, TransferPlan


def box_views(
    layout: TransferLayout, rank: int, local: Mapping[str, Tensor], tensor: str, box: Box
) -> Iterator[tuple[Box, Tensor]]:
    """Yield the parts of a box that a rank stores, each with its view in the rank's local tensors."""
    for part, block in layout.within(rank, tensor, box):
        yield part, block_view(local, tensor, block, part)


def torch_dtype(layout: TransferLayout, tensor: str) -> torch.dtype:
    """Return the dtype in which messages carry a tensor."""
    dtype: torch.dtype = getattr(torch, layout.tensors[tensor].dtype)
    return dtype


class Sides:
    """This rank's local tensors on both sides of a plan, and its transfers."""

    def __init__(
        self, plan: TransferPlan, rank: int, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]
    ) -> None:
        self.plan, self.rank, self.transfers = plan, rank, plan.for_rank(rank)
        self.source, self.destination = source, destination
        if packed := next((name for name, each in destination.items() if isinstance(each, DequantizedTensor)), None):
            raise WeightSyncError(
                f"{packed} of the destination is in packed bytes, which take no values of a transfer: send them to a "
                "model without Quantized"
            )

    @property
    def device(self) -> torch.device:
        """The device of the first local tensor."""
        tensors = (*self.source.values(), *self.destination.values())
        return tensors[0].device if tensors else torch.device("cpu")

    def require_tensors(self) -> None:
        """Look up every local tensor: a missing tensor raises before a message is sent."""
        for block in self.transfers:
            if block.source == self.rank and not block.is_relay:
                list(box_views(self.plan.source, self.rank, self.source, block.tensor, block.box))
            if block.destination == self.rank or (block.is_relay and block.source == self.rank):
                relays = block.is_relay and block.source == self.rank
                for _, view in box_views(self.plan.destination, self.rank, self.destination, block.tensor, block.box):
                    self._require_dtype(block.tensor, view.dtype, relays=relays)

    def _require_dtype(self, tensor: str, stored: torch.dtype, *, relays: bool) -> None:
        """Refuse a dtype that changes the meaning of sent values, such as FP8 without scales, or relays fewer bits."""
        sent = torch_dtype(self.plan.destination, tensor)
        if stored != sent and not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (stored, sent)):
            raise WeightSyncError(
                f"rank {self.rank} stores {tensor} in {stored} and is sent {sent}, which cannot be converted: give a "
                "tensor of the sent dtype, or send another dtype (dtype=, quantize=)"
            )
        if relays and torch.promote_types(stored, sent) != stored:
            raise WeightSyncError(
                f"rank {self.rank} stores {tensor} in {stored} and passes it on in {sent}, with fewer bits than it "
                "received: send the dtype that the engines store (dtype=), or plan without relay"
            )

    def empty(self, block: BlockTransfer) -> Tensor:
        """An empty tensor of the box's shape, in the dtype of messages."""
        dtype = torch_dtype(self.plan.destination, block.tensor)
        return torch.empty(box_shape(block.box), dtype=dtype, device=self.device)

    def copy(self, block: BlockTransfer) -> None:
        """Copy a box within this rank, rounded to the dtype of messages."""
        values = self.empty(block)
        self.read(block, values)
        self.write(block, values)

    def read(self, block: BlockTransfer, values: Tensor) -> None:
        """Fill a tensor of a box's shape from the source, or from received values for a relay."""
        if block.is_relay:
            self.read_back(block, values)
            return
        for part, view in box_views(self.plan.source, self.rank, self.source, block.tensor, block.box):
            values[inside(block.box, part)].copy_(view)

    def read_back(self, block: BlockTransfer, values: Tensor) -> None:
        """Fill a tensor of a box's shape with the destination's values."""
        for part, view in box_views(self.plan.destination, self.rank, self.destination, block.tensor, block.box):
            values[inside(block.box, part)].copy_(view)

    def write(self, block: BlockTransfer, values: Tensor) -> None:
        """Write a box's values to all of this rank's destination tensors that hold a part of the box."""
        for part, view in box_views(self.plan.destination, self.rank, self.destination, block.tensor, block.box):
            view.copy_(values[inside(block.box, part)])


def message_values(plan: TransferPlan, message: Message, run: Tensor) -> Iterator[tuple[BlockTransfer, Tensor]]:
    """Yield a message's transfers, and views of the message's bytes in the dtype and shape of each box."""
    parts = torch.split(run, [block.nbytes for block in message.transfers])
    for block, part in zip(message.transfers, parts, strict=True):
        yield block, part.view(torch_dtype(plan.destination, block.tensor)).view(box_shape(block.box))
