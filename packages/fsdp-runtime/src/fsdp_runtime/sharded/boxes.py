"""Boxes of tensors on ranks: offsets of shards, and chunks of stored tensors that fill or view their boxes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Replicate as Replicated

from fsdp_runtime._torch_compat import is_strided, local_tensor, root_mesh
from fsdp_runtime.errors import ConversionError, WeightsError, WeightSyncError
from fsdp_runtime.model.state import StateEntry
from tp_plans import Replicate, Shard
from tp_plans.boxes import (
    Box,
    MeshLayout,
    ShardStep,
    StridedShard,
    box_shape,
    full_box,
    intersection,
    mesh_boxes,
    split_box,
    volume,
)
from tp_plans.boxes import shard_steps as plan_steps
from tp_plans.transfer import StoredBlock

#: Bytes per read; they are converted, or copied to a device, before the next read.
_READ_AT_ONCE = 2**24

#: Reads a box of a stored tensor by name; the result has all dims of the stored tensor.
ReadBox = Callable[[str, Box], Tensor]


def shard_steps(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> list[ShardStep]:
    """Return the sharding steps of a DTensor in the order of :func:`tp_plans.boxes.shard_steps`."""
    return plan_steps([mesh_layout_of(placement) for placement in placements], mesh_shape)


def mesh_layout_of(placement: Placement) -> MeshLayout:
    """Return a placement as a layout of tp_plans."""
    if is_strided(placement):
        return StridedShard(placement.dim)  # type: ignore[attr-defined]
    if placement.is_shard():
        return Shard(placement.dim)  # type: ignore[attr-defined]
    if placement.is_replicate():
        return Replicate()
    raise WeightsError(f"a parameter is placed as {placement}: only Shard and Replicate can be read or saved")


def require_layouts(tensors: Mapping[str, Tensor]) -> None:
    """Raise with the tensor's name if this rank's part of a tensor is unknown."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            try:
                dtensor_box(tensor)
            except WeightsError as error:
                raise WeightsError(f"{name}: {error}") from None


def require_plain_shards(entries: Sequence[StateEntry]) -> None:
    """Check that this rank's part of each tensor is known, and no quantization library's tensor subclass."""
    plain = (Tensor, nn.Parameter, nn.Buffer)
    quantized = [entry for entry in entries if type(local_tensor(entry.tensor)) not in plain]
    if quantized:
        raise ConversionError(
            f"{len(quantized)} weights are of class {type(local_tensor(quantized[0].tensor)).__name__}, first "
            f"{quantized[0].names[0]}: quantized weights are neither loaded nor streamed; dequantize the model, or "
            "quantize it at the receiver"
        )
    require_layouts({entry.names[0]: entry.tensor for entry in entries})


def local_box(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Box:
    """Return the box of a full tensor of ``shape`` that the rank at ``coordinate`` of the mesh holds."""
    # Boxes match FSDP2's layout for uneven strided shards too. DTensor's arithmetic (torch 2.13) is wrong there from
    # three data-parallel ranks on: for a dim of 7 over ``dp_shard=3, tp=2`` it expects the last element on rank (2, 0),
    # and FSDP2 stores it on (2, 1).
    start, size = [0] * len(shape), list(shape)
    for step in shard_steps(placements, mesh_shape):
        offset, length = step.chunk_range(size[step.dim], coordinate[step.axis])
        start[step.dim] += offset
        size[step.dim] = length
    return tuple((first, first + length) for first, length in zip(start, size, strict=True))


def zeros_by_rows(like: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return zeros with the rows of a tensor: sharded as ``like``, and replicated on the last dim."""
    if not isinstance(like, DTensor):
        return torch.zeros((*like.shape[:-1], columns), dtype=dtype, device=like.device)
    rows = box_shape(dtensor_box(like))[:-1]
    local = torch.zeros((*rows, columns), dtype=dtype, device=like.to_local().device)
    placements = [Replicated() if getattr(each, "dim", None) == like.ndim - 1 else each for each in like.placements]
    return dtensor_of(local, like.device_mesh, placements, (*like.shape[:-1], columns))


def dtensor_of(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return the DTensor of a full shape with this rank's local tensor."""
    full = torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def dtensor_box(tensor: DTensor) -> Box:
    """Return the box of this rank's local tensor in the full tensor."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WeightsError(f"this rank is outside the mesh {mesh} that holds the model: call it on the mesh's ranks")
    box = local_box(tensor.shape, tensor.placements, mesh.shape, coordinate)
    expected, local = box_shape(box), tensor.to_local()
    if expected != tuple(local.shape) and (volume(box) or local.numel()):  # FSDP2 may give an empty shard another shape
        raise WeightsError(
            f"a parameter of shape {tuple(tensor.shape)} with placements {tensor.placements} on a mesh of shape "
            f"{tuple(mesh.shape)} has a local shape {tuple(local.shape)} on rank {coordinate}, expected {expected}"
        )
    return box


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a target tensor and its position in a stored tensor."""

    source: str  # name of the stored tensor
    target: Box
    start: tuple[int, ...]  # index of the first element in the source
    dims: tuple[int | None, ...]  # source dim of each target dim; ``None`` for a target dim of size 1

    def intersect(self, box: Box) -> Chunk | None:
        """Return the part of the chunk inside a box of the target, ``None`` if it is empty."""
        if (target := intersection(self.target, box)) is None:
            return None
        start = list(self.start)
        for (old, _), (new, _), dim in zip(self.target, target, self.dims, strict=True):
            if dim is not None:
                start[dim] += new - old
        return replace(self, target=target, start=tuple(start))

    @property
    def source_box(self) -> Box:
        """The box of the source that holds the chunk's elements."""
        size = [1] * len(self.start)
        for count, dim in zip(box_shape(self.target), self.dims, strict=True):
            if dim is not None:
                size[dim] = count
        return tuple((first, first + count) for first, count in zip(self.start, size, strict=True))

    def target_of(self, part: Box) -> Box:
        """Return the box of the target for a part of :attr:`source_box`."""
        moved = [(low - first, high - first) for (low, high), first in zip(part, self.start, strict=True)]
        return tuple(
            side if dim is None else (side[0] + moved[dim][0], side[0] + moved[dim][1])
            for side, dim in zip(self.target, self.dims, strict=True)
        )

    def to_target(self, tensor: Tensor) -> Tensor:
        """Return a view of the values of :attr:`source_box` in the target's dims."""
        return in_dims(tensor, self.dims, box_shape(self.target))


def in_dims(tensor: Tensor, dims: Sequence[int | None], shape: Sequence[int]) -> Tensor:
    """Return a view of a tensor with the given dims; ``None`` adds a dim of size 1, and omitted dims have size 1."""
    used = [dim for dim in dims if dim is not None]
    unused = [dim for dim in range(tensor.ndim) if dim not in used]
    return tensor.permute([*used, *unused]).view(tuple(shape))


def identity_chunk(name: str, shape: Sequence[int]) -> Chunk:
    """Return the chunk that maps a stored tensor to a target of the same shape."""
    return Chunk(name, full_box(shape), (0,) * len(shape), tuple(range(len(shape))))


def slices_of(box: Box) -> tuple[slice, ...]:
    """Return the slices that select a box of a tensor."""
    return tuple(slice(*side) for side in box)


def inside(box: Box, part: Box) -> tuple[slice, ...]:
    """Return the slices of a part of a box, in a tensor of the box's shape."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, box, strict=True))


def fill_local(tensor: Tensor, chunks: Sequence[Chunk], read: ReadBox) -> None:
    """Fill this rank's shard of a tensor; only its values are read. They are converted to the tensor's dtype."""
    fill_box(*local_part(tensor), chunks, read)


@torch.no_grad()
def fill_box(part: Tensor, box: Box, chunks: Sequence[Chunk], read: ReadBox) -> None:
    """Fill ``part``, the values of a tensor at ``box``."""
    for chunk in chunks:
        if (needed := chunk.intersect(box)) is not None:
            for piece in split_box(needed.source_box, _READ_AT_ONCE // part.itemsize):
                target = needed.target_of(piece)
                part[inside(box, target)].copy_(in_dims(read(needed.source, piece), needed.dims, box_shape(target)))


def read_box(box: Box, dtype: torch.dtype, chunks: Sequence[Chunk], read: ReadBox) -> Tensor:
    """Return the values of a tensor at ``box``, on the CPU."""
    part = torch.empty(box_shape(box), dtype=dtype)
    fill_box(part, box, chunks, read)
    return part


@torch.no_grad()
def fill_from(tensor: Tensor, full: Tensor) -> None:
    """Fill this rank's shard of a tensor with its part of the full values."""
    part, box = local_part(tensor)
    part.copy_(full[slices_of(box)])


def local_part(tensor: Tensor) -> tuple[Tensor, Box]:
    """Return this rank's local tensor and its box of the full tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(), dtensor_box(tensor)
    return tensor, full_box(tensor.shape)


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
        return [(rank, full_box(tensor.shape)) for rank in everyone]
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
