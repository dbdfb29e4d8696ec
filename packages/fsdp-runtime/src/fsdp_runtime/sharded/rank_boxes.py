"""Boxes of a tensor on ranks, blocks of checkpoint tensors in local tensors, and views of these blocks."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import root_mesh
from fsdp_runtime.errors import WeightSyncError
from fsdp_runtime.sharded.chunks import Chunk, in_dims, slices_of
from fsdp_runtime.sharded.shard_offsets import dtensor_box, mesh_layout_of
from tp_plans.boxes import Box, box_shape, intersection, mesh_boxes
from tp_plans.transfer import StoredBlock


class BoxOwners:
    """Finds the ranks that hold parts of a tensor; boxes are computed once per layout."""

    def __init__(self, everyone: Sequence[int]) -> None:
        self._everyone = everyone  # the ranks that hold a plain tensor
        self._found: dict[Hashable, tuple[Tensor, list[tuple[Box, tuple[int, ...]]]]] = {}

    def near(self, tensor: Tensor, wanted: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Yield the boxes on ranks that overlap ``wanted``, with the ranks of each box."""
        key = layout_key(tensor)
        if key not in self._found:
            owners: dict[Box, list[int]] = {}
            for rank, box in rank_boxes(tensor, self._everyone):
                owners.setdefault(box, []).append(rank)
            self._found[key] = _sides(list(owners)), [(box, tuple(ranks)) for box, ranks in owners.items()]
        sides, boxes = self._found[key]
        near = _sides([wanted])
        overlap = torch.minimum(sides[..., 1], near[..., 1]) > torch.maximum(sides[..., 0], near[..., 0])
        return (boxes[number] for number in overlap.all(-1).nonzero().flatten().tolist())


def _sides(boxes: Sequence[Box]) -> Tensor:
    """Starts and stops of boxes, ``[boxes, dims, 2]``."""
    return torch.tensor(boxes, dtype=torch.int64, device="cpu").view(len(boxes), len(boxes[0]), 2)


def layout_key(tensor: Tensor) -> Hashable:
    """Key of a layout: equal for tensors with the same shape and placements on one mesh."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape)
    return tuple(tensor.shape), tensor.placements, tensor.device_mesh


def rank_boxes(tensor: Tensor, everyone: Sequence[int]) -> list[tuple[int, Box]]:
    """The box of a model's tensor on each rank that holds a part."""
    if not isinstance(tensor, DTensor):
        return [(rank, tuple((0, size) for size in tensor.shape)) for rank in everyone]
    dtensor_box(tensor)  # raises if the local tensor does not have the shape its placements imply
    mesh = tensor.device_mesh
    boxes = mesh_boxes(tensor.shape, mesh.shape, [mesh_layout_of(placement) for placement in tensor.placements])
    by_rank = dict(zip(mesh.mesh.flatten().tolist(), boxes, strict=True))
    return [(rank, by_rank[twin]) for rank, twin in _twins(mesh).items()]


def _twins(mesh: DeviceMesh) -> dict[int, int]:
    """Map each rank of the root mesh to the rank of ``mesh`` with the same values."""
    # FSDP2 puts tensors that ``tp`` does not shard on a submesh. Such a tensor is replicated over the axes that the
    # submesh lacks: a rank holds the values of the submesh's rank with the same coordinate on all other axes.
    ranks = root_mesh(mesh).mesh
    places = {
        int(rank): place
        for rank, place in zip(ranks.flatten(), itertools.product(*map(range, ranks.shape)), strict=True)
    }
    members = [places[rank] for rank in mesh.mesh.flatten().tolist()]
    fixed = [len({place[axis] for place in members}) == 1 for axis in range(ranks.ndim)]
    return {
        rank: int(ranks[tuple(members[0][axis] if fixed[axis] else place[axis] for axis in range(ranks.ndim))])
        for rank, place in places.items()
    }


def stored_part(chunk: Chunk, rank: int, held: Box) -> Iterator[StoredBlock]:
    """Yield a rank's part of an exported chunk, as a block of the exported tensor."""
    if (common := intersection(chunk.source_box, held)) is not None:
        offset = tuple(start - first for (start, _), (first, _) in zip(common, held, strict=True))
        yield StoredBlock(rank, chunk.target_of(common), chunk.source, offset, chunk.dims)


def block_view(local: Mapping[str, Tensor], tensor: str, block: StoredBlock, part: Box) -> Tensor:
    """Return a view into a rank's local tensors: a part of a checkpoint tensor's block, in the tensor's dims."""
    view = local.get(block.local)
    reach = tuple(stop for _, stop in block.local_box(block.box))
    if view is None or view.ndim != len(reach) or any(a < b for a, b in zip(view.shape, reach, strict=True)):
        has = "is missing" if view is None else f"has shape {tuple(view.shape)}"
        raise WeightSyncError(
            f"the local tensor {block.local} {has} on rank {block.rank}; its layout stores part of {tensor} there, up "
            f"to index {reach}: give the tensors that the layout was made for"
        )
    return in_dims(view[slices_of(block.local_box(part))], block.dims, box_shape(part))
