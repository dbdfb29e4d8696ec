"""Offsets of shards: the slices of a full tensor that each rank holds under its placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Replicate as Replicated

from fsdp_runtime._torch_compat import is_strided, local_tensor
from fsdp_runtime.errors import ConversionError, WeightsError
from fsdp_runtime.model.state import StateEntry
from tp_plans import Replicate, Shard
from tp_plans.boxes import Box, MeshLayout, ShardStep, StridedShard, box_shape, volume
from tp_plans.boxes import shard_steps as plan_steps


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
    full = torch.empty((*like.shape[:-1], columns), device="meta")
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


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
