"""Views of local tensors as parts of checkpoint tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fsdp_runtime.errors import WeightSyncError
from tp_plans.transfer import Box, StoredBlock, TransferLayout


def block_view(local: Mapping[str, Tensor], tensor: str, block: StoredBlock, part: Box) -> Tensor:
    """Return a view of a part of a block of a checkpoint tensor, in that tensor's dims, in the rank's local tensors."""
    view = local.get(block.local)
    reach = tuple(stop for _, stop in block.local_box(block.box))
    if view is None or view.ndim != len(reach) or any(a < b for a, b in zip(view.shape, reach, strict=True)):
        has = "is missing" if view is None else f"has shape {tuple(view.shape)}"
        raise WeightSyncError(
            f"the local tensor {block.local} {has} on rank {block.rank}; its layout stores part of {tensor} there, up "
            f"to index {reach}: give the tensors that the layout was made for"
        )
    for dim, (start, stop) in enumerate(block.local_box(part)):
        view = view.narrow(dim, start, stop - start)
    used = [dim for dim in block.dims if dim is not None]
    unused = [dim for dim in range(view.ndim) if dim not in used]
    view = view.permute([*used, *unused])
    for _ in unused:
        view = view.squeeze(-1)
    for position, local_dim in enumerate(block.dims):
        if local_dim is None:
            view = view.unsqueeze(position)
    return view


def box_views(
    layout: TransferLayout, rank: int, local: Mapping[str, Tensor], tensor: str, box: Box
) -> Iterator[tuple[Box, Tensor]]:
    """Yield the parts of a box that a rank stores, each with its view in the rank's local tensors."""
    for part, block in layout.within(rank, tensor, box):
        yield part, block_view(local, tensor, block, part)


def inside(box: Box, part: Box) -> tuple[slice, ...]:
    """Return the slices of a tensor of a box's shape that hold a part of the box."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, box, strict=True))


def torch_dtype(layout: TransferLayout, tensor: str) -> torch.dtype:
    """Return the dtype in which a tensor is sent."""
    dtype: torch.dtype = getattr(torch, layout.tensors[tensor].dtype)
    return dtype
