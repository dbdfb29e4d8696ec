"""Which part of a full tensor a rank holds: the one place that knows how placements cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import DTensor, Placement

from fsdp_runtime._torch_compat import is_strided
from fsdp_runtime.errors import WeightsError


@dataclass(frozen=True)
class Cut:
    """One division of a tensor: dim ``dim`` of the piece so far, into ``parts`` chunks along mesh axis ``axis``."""

    axis: int
    dim: int
    parts: int

    def chunk(self, size: int) -> int:
        """The size of a full chunk of ``size``; as in ``torch.chunk``, the last ones are shorter or empty."""
        return -(-size // self.parts)

    def own(self, size: int, index: int) -> tuple[int, int]:
        """Where chunk ``index`` of ``size`` begins, and how long it is."""
        start = min(size, self.chunk(size) * index)
        return start, min(size - start, self.chunk(size))


def cuts(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> list[Cut]:
    """The cuts in an order in which they give every rank its part.

    Cuts of different dims commute.  Of one dim, plain shards divide it from the first mesh axis to the last; a
    strided one divides what the axes to its right have left: FSDP2 comes after ``tp``, though first in the mesh.
    So the last axis goes first wherever it may, and parameters that ``tp`` and FSDP2 cut agree on the order.
    """
    ordered: list[Cut] = []
    for axis, placement in reversed(list(enumerate(placements))):
        if is_strided(placement) or placement.is_shard():
            cut = Cut(axis, placement.dim, mesh_shape[axis])  # type: ignore[attr-defined]
            same_dim = (place for place, other in enumerate(ordered) if other.dim == cut.dim)
            ordered.insert(len(ordered) if is_strided(placement) else next(same_dim, len(ordered)), cut)
        elif not placement.is_replicate():
            raise WeightsError(f"a parameter is laid out as {placement}: only shards and replicas can be read or saved")
    return ordered


def own_slice(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[slice, ...]:
    """The part of a full tensor of ``shape`` that the rank at ``coordinate`` of the mesh holds, as one slice a dim.

    This is where FSDP2 puts the elements for uneven strided shards too, where DTensor's own arithmetic (torch
    2.13) goes wrong from three data-parallel ranks on: of a dim of 7 over ``dp_shard=3, tp=2`` it expects the last
    element on rank (2, 0), and FSDP2 has it on (2, 1).
    """
    start, size = [0] * len(shape), list(shape)
    for cut in cuts(placements, mesh_shape):
        offset, length = cut.own(size[cut.dim], coordinate[cut.axis])
        start[cut.dim] += offset
        size[cut.dim] = length
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


def local_slice(tensor: DTensor) -> tuple[slice, ...]:
    """The part of the full tensor that this rank holds.

    Raises:
        WeightsError: this rank is not in the tensor's mesh, or holds a part of another shape.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WeightsError(f"this rank is outside the mesh {mesh} that holds the model: call it on the mesh's ranks")
    own = own_slice(tensor.shape, tensor.placements, mesh.shape, coordinate)
    expected, actual = tuple(part.stop - part.start for part in own), tuple(tensor.to_local().shape)
    if expected != actual and (math.prod(expected) or math.prod(actual)):  # FSDP2 writes an empty shard's shape its way
        raise WeightsError(
            f"a parameter of shape {tuple(tensor.shape)} laid out as {tensor.placements} on a mesh of shape "
            f"{tuple(mesh.shape)} has {actual} on rank {coordinate} where {expected} is due"
        )
    return own
