"""Offsets of shards: the slices of a full tensor that each rank holds under its placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import DTensor, Placement

from fsdp_runtime._torch_compat import is_strided
from fsdp_runtime.errors import WeightsError


@dataclass(frozen=True)
class ShardStep:
    """One sharding of a tensor: dim ``dim`` of the part left by earlier steps, into ``num_chunks`` over an axis.

    Args:
        axis: index of the mesh axis.
        dim: the tensor dim.
        num_chunks: size of the mesh axis.
    """

    axis: int
    dim: int
    num_chunks: int

    def chunk_size(self, size: int) -> int:
        """Return the size of a full chunk of ``size``; as in ``torch.chunk``, the last chunks are shorter or empty."""
        return -(-size // self.num_chunks)

    def chunk_range(self, size: int, index: int) -> tuple[int, int]:
        """Return the start and the length of chunk ``index`` of ``size``."""
        start = min(size, self.chunk_size(size) * index)
        return start, min(size - start, self.chunk_size(size))


def shard_steps(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> list[ShardStep]:
    """Return the sharding steps in an order that reproduces every rank's shard.

    Steps on different dims commute.  On one dim, plain shards apply from the first mesh axis to the last, while a
    strided shard applies after the axes to its right: FSDP2 shards after ``tp``, although its axis comes first in the
    mesh.  The last axis goes first wherever that is allowed, so that parameters sharded over ``tp`` and FSDP2 agree on
    the order.

    Raises:
        WeightsError: a placement is neither a shard nor a replica.
    """
    ordered: list[ShardStep] = []
    for axis, placement in reversed(list(enumerate(placements))):
        if is_strided(placement) or placement.is_shard():
            step = ShardStep(axis, placement.dim, mesh_shape[axis])  # type: ignore[attr-defined]
            same_dim = (index for index, other in enumerate(ordered) if other.dim == step.dim)
            ordered.insert(len(ordered) if is_strided(placement) else next(same_dim, len(ordered)), step)
        elif not placement.is_replicate():
            raise WeightsError(f"a parameter is placed as {placement}: only Shard and Replicate can be read or saved")
    return ordered


def local_slices(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[slice, ...]:
    """Return the slices of a full tensor of ``shape`` that the rank at ``coordinate`` of the mesh holds.

    They match FSDP2's layout for uneven strided shards too, where DTensor's own arithmetic (torch 2.13) is wrong from
    three data-parallel ranks on: for a dim of 7 over ``dp_shard=3, tp=2`` it expects the last element on rank (2, 0),
    and FSDP2 stores it on (2, 1).
    """
    start, size = [0] * len(shape), list(shape)
    for step in shard_steps(placements, mesh_shape):
        offset, length = step.chunk_range(size[step.dim], coordinate[step.axis])
        start[step.dim] += offset
        size[step.dim] = length
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


def dtensor_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return the slices of the full tensor that this rank's local tensor holds.

    Raises:
        WeightsError: this rank is outside the tensor's mesh, or its local tensor has another shape.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WeightsError(f"this rank is outside the mesh {mesh} that holds the model: call it on the mesh's ranks")
    slices = local_slices(tensor.shape, tensor.placements, mesh.shape, coordinate)
    expected, actual = tuple(side.stop - side.start for side in slices), tuple(tensor.to_local().shape)
    if expected != actual and (math.prod(expected) or math.prod(actual)):  # FSDP2 may give an empty shard another shape
        raise WeightsError(
            f"a parameter of shape {tuple(tensor.shape)} with placements {tensor.placements} on a mesh of shape "
            f"{tuple(mesh.shape)} has a local shape {actual} on rank {coordinate}, expected {expected}"
        )
    return slices
