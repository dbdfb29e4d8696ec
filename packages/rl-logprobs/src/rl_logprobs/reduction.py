"""Over which ranks a norm is summed, and how often the sum meets each gradient.

Parameters of one model usually live on several meshes (the FSDP axis alone, FSDP and tensor parallelism).  A
mesh that is part of another is summed together with it: every rank of the larger mesh adds its local part,
scaled down by how many ranks hold the same part, so that one collective serves both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from rl_logprobs._torch_compat import joint_group, ranks_of, same_root


class Layout(NamedTuple):
    """How a DTensor lies over ranks; a tensor without a mesh has none."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @property
    def shards(self) -> int:
        """Into how many different parts the tensor is cut (1: every rank holds all of it)."""
        return math.prod(
            self.mesh.size(dim)
            for dim, placement in enumerate(self.placements)
            if not isinstance(placement, Replicate | Partial)
        )


@dataclass(frozen=True)
class Domain:
    """Ranks that add up their parts: those of ``mesh`` (None: this rank alone), crossed with ``groups``.

    ``groups`` hold ranks that own *different* parameters, such as the stages of a pipeline.
    """

    mesh: DeviceMesh | None
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def different(self) -> int:
        """Ranks of ``groups``: each parameter is held by one in so many."""
        return math.prod(dist.get_world_size(group) for group in self.groups)

    @property
    def size(self) -> int:
        """Number of ranks that add up."""
        return (1 if self.mesh is None else self.mesh.size()) * self.different

    def share(self, layout: Layout | None) -> float:
        """The factor by which a rank scales its part, so that the sum counts every element once."""
        return (1 if layout is None else layout.shards) * self.different / self.size

    def device(self, default: torch.device) -> torch.device:
        """Where the collective can run: gradients may be offloaded to a CPU that has no backend."""
        return default if self.mesh is None else torch.device(self.mesh.device_type)

    def process_groups(self) -> list[dist.ProcessGroup | None]:
        """The groups to reduce over in turn; only the world (None) where that is the same ranks."""
        if self.size > 1 and self.size == dist.get_world_size():
            return [None]
        return [*_mesh_groups(self.mesh), *(group for group in self.groups if dist.get_world_size(group) > 1)]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """``values``, summed over the domain in place."""
        for group in self.process_groups():
            dist.all_reduce(values, group=group)
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over the domain; NaN if any rank has it, which travels on its own: gloo's maximum loses it."""
        found = torch.stack([values.nan_to_num(nan=0.0, posinf=math.inf), values.isnan().to(values.dtype)])
        for group in self.process_groups():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return found[0].masked_fill(found[1] > 0, math.nan)


def _mesh_groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """One group of all the mesh's ranks, or one a dim where only the whole world could make that group."""
    dims = [] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    joint = None if mesh is None or len(dims) < 2 else joint_group(mesh)
    return dims if joint is None else [joint]


def domains(
    parameters: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup]
) -> dict[Domain, list[torch.Tensor]]:
    """The fewest domains that hold every parameter's mesh, in the order in which they are met, and whom each counts.

    A plain tensor counts in the first.  Derived from the parameters alone: a rank without gradients takes part in the
    same collectives.
    """
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    served: dict[DeviceMesh, list[DeviceMesh]] = {}
    for mesh in by_mesh:
        if mesh is None:
            continue
        host = next((outer for outer in served if _part_of(mesh, outer)), None)
        if host is not None:
            served[host].append(mesh)
        else:
            inner = [outer for outer in served if _part_of(outer, mesh)]
            served[mesh] = [mesh, *(part for outer in inner for part in served.pop(outer))]
    found = {
        Domain(outer, tuple(groups)): [p for mesh in meshes for p in by_mesh[mesh]] for outer, meshes in served.items()
    } or {Domain(None, tuple(groups)): []}
    next(iter(found.values())).extend(by_mesh.get(None, []))
    return found


def _part_of(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether ``other`` is made of ``mesh`` and its siblings, so that summing over it serves both.

    Equal ranks suffice; a subset must be a slice of the same root, else nothing says that the remaining
    ranks of ``other`` hold that parameter at all.
    """
    if mesh == other:
        return True
    mine, theirs = ranks_of(mesh), ranks_of(other)
    return mine == theirs or (mine < theirs and same_root(mesh, other))
