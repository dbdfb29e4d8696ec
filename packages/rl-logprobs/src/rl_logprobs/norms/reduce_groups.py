"""The ranks over which a norm is summed, and the weight of each gradient in the sum.

Parameters of one model usually have several meshes (the FSDP axis alone, FSDP and tensor parallelism).  Norms over a
mesh that is part of a larger one are summed over the larger mesh: every rank adds its local part, scaled down by the
number of ranks that hold the same part, so that one collective serves both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ReferenceType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from rl_logprobs._torch_compat import joint_group, ranks_of, same_root

#: The attribute of a parameter in a pipeline stage: the group of all stages, whether this rank counts the parameter,
#: and the device and dtype of a norm over all stages.  ``fsdp_runtime.parallelize`` sets it.  Of the ranks with a tied
#: parameter, the first counts it.  ``torch.distributed.group`` has the last model's for a stage without parameters: a
#: weak reference in place of the group.
STAGES = "_pipeline_stages"


class Stages(NamedTuple):
    """The pipeline stages of a model, and the norm over all of them."""

    group: dist.ProcessGroup
    counted: bool
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32


def stages_of(parameters: Sequence[torch.Tensor]) -> Stages | None:
    """Return the stages of a model with these parameters; without any, the last model's, which then waits for all."""
    owners = parameters or (dist.group,)
    stages = next((stages for owner in owners if (stages := getattr(owner, STAGES, None)) is not None), None)
    if stages is None:
        return None
    group = stages[0]() if isinstance(stages[0], ReferenceType) else stages[0]
    return Stages(group, *stages[1:]) if group is not None and _is_current(group) else None


def _is_current(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_backend(group))
    except ValueError:  # the group was destroyed
        return False


def counts(parameter: torch.Tensor) -> bool:
    """Return whether this rank counts a parameter, which other stages may have too."""
    stages = getattr(parameter, STAGES, None)
    return stages is None or bool(stages[1])


class MeshPlacements(NamedTuple):
    """The mesh and placements of a DTensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @property
    def num_shards(self) -> int:
        """The number of different shards of the tensor (1: every rank holds the full tensor)."""
        return math.prod(
            self.mesh.size(dim)
            for dim, placement in enumerate(self.placements)
            if not isinstance(placement, Replicate | Partial)
        )


@dataclass(frozen=True)
class ReduceGroup:
    """The ranks that sum their parts: ranks of ``mesh`` (None: this rank alone), times ranks of ``groups``."""

    mesh: DeviceMesh | None
    groups: tuple[dist.ProcessGroup, ...]  # with different parameters on their ranks, such as pipeline stages

    @property
    def num_stages(self) -> int:
        """The number of rank combinations in ``groups``; each parameter is held by one of them."""
        return math.prod(dist.get_world_size(group) for group in self.groups)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return (1 if self.mesh is None else self.mesh.size()) * self.num_stages

    def replica_weight(self, placement: MeshPlacements | None) -> float:
        """Return the factor on a rank's part that makes the sum count every element once."""
        return (1 if placement is None else placement.num_shards) * self.num_stages / self.size

    def device(self, default: torch.device) -> torch.device:
        """Return a device on which the collective can run: offloaded gradients are on a CPU without a backend."""
        return default if self.mesh is None else torch.device(self.mesh.device_type)

    def process_groups(self) -> list[dist.ProcessGroup | None]:
        """Return the process groups to reduce over in turn; the world (None) alone where it has the same ranks."""
        if self.size > 1 and self.size == dist.get_world_size():
            return [None]
        return [*_mesh_groups(self.mesh), *(group for group in self.groups if dist.get_world_size(group) > 1)]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values`` over the ranks in place and return them."""
        for group in self.process_groups():
            dist.all_reduce(values, group=group)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the maximum over the ranks, NaN if any rank has NaN."""
        # NaN is sent as a separate flag, because gloo's maximum loses it (torch 2.11 to 2.15; no upstream issue found).
        maxima = torch.stack([values.nan_to_num(nan=0.0, posinf=math.inf), values.isnan().to(values.dtype)])
        for group in self.process_groups():
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        return maxima[0].masked_fill(maxima[1] > 0, math.nan)


def _mesh_groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Return one group of all the mesh's ranks, or one per dim where the joint group cannot be created."""
    per_dim = [] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    joint = None if mesh is None or len(per_dim) < 2 else joint_group(mesh)
    return per_dim if joint is None else [joint]


def reduce_groups(
    parameters: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup]
) -> dict[ReduceGroup, list[torch.Tensor]]:
    """Return the fewest reduce groups that cover all parameters' meshes, each with the parameters that it sums."""
    # Groups have the order of the parameters; plain tensors belong to the first group. The result follows from the
    # parameters alone, so that ranks without gradients take part in the same collectives.
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    covered: dict[DeviceMesh, list[DeviceMesh]] = {}
    for mesh in by_mesh:
        if mesh is None:
            continue
        larger = next((outer for outer in covered if _is_part_of(mesh, outer)), None)
        if larger is not None:
            covered[larger].append(mesh)
        else:
            smaller = [inner for inner in covered if _is_part_of(inner, mesh)]
            covered[mesh] = [mesh, *(part for inner in smaller for part in covered.pop(inner))]
    members = {
        ReduceGroup(outer, tuple(groups)): [parameter for mesh in meshes for parameter in by_mesh[mesh]]
        for outer, meshes in covered.items()
    } or {ReduceGroup(None, tuple(groups)): []}
    next(iter(members.values())).extend(by_mesh.get(None, []))
    return members


def _is_part_of(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Return whether a sum over ``other`` with replica weights is also right for tensors on ``mesh``."""
    # Equal ranks suffice. A subset must be a slice of the same root mesh; otherwise the remaining ranks of ``other``
    # need not hold the parameter.
    if mesh == other:
        return True
    ranks, other_ranks = ranks_of(mesh), ranks_of(other)
    return ranks == other_ranks or (ranks < other_ranks and same_root(mesh, other))
