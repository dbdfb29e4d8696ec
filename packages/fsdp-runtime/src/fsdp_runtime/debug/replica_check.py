"""Check that replicated tensors are equal on all ranks.

A replica that misses one reduction keeps training with slightly different values on each rank, and only one replica is
saved or streamed (pytorch/pytorch#160169).  Comparing hashes detects this at the cost of one small collective per axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_runtime._torch_compat import all_gather_flat
from fsdp_runtime.errors import ReplicaError
from fsdp_runtime.mesh.experts import DIVIDED
from fsdp_runtime.model.stages import stages_of
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.sharded.hashing import hash_bits


@torch.no_grad()
def assert_replicas_equal(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Raise unless every parameter and persistent buffer is bit-identical on all ranks that replicate it.

    Collective over all ranks of the mesh: one all-gather of one number per tensor for each mesh axis.

    Args:
        model: before, during or after training; parameters must be sharded (not inside ``unsharded``).
        mesh: the root mesh; tensors then count as replicated over the axes that their own mesh lacks, except ``pp``.
            Without ``mesh`` only the axes of each DTensor's mesh are compared, and plain tensors are not compared.

    Raises:
        ReplicaError: tensors differ; all are named, with the axis and the ranks, on every rank that compared them.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import assert_replicas_equal
        >>> assert_replicas_equal(nn.Linear(2, 3))  # nothing to compare without a mesh
    """
    state_entries(model)  # raises where tensors are offloaded
    stages = stages_of(model)
    groups: dict[ProcessGroup, tuple[str, list[tuple[str, Tensor]]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        for axis, group in _replica_groups(tensor, mesh, () if stages is None else ("pp",)):
            groups.setdefault(group, (axis, []))[1].append((name, tensor))
    differing: dict[str, list[str]] = defaultdict(list)
    for group, (axis, tensors) in groups.items():
        local = torch.stack([_hash(tensor) for _, tensor in tensors])
        gathered = local.new_empty(dist.get_world_size(group), len(local))
        all_gather_flat(gathered.view(-1), local, group).wait()
        differs = (gathered != gathered[0]).any(0).tolist()
        axis_label = f"axis {axis} (ranks {', '.join(map(str, dist.get_process_group_ranks(group)))})"
        for (name, _), different in zip(tensors, differs, strict=True):
            if different:
                differing[name].append(axis_label)
    if differing:
        lines = "\n".join(f"  {name}: over {' and '.join(axes)}" for name, axes in differing.items())
        raise ReplicaError(
            f"{len(differing)} tensors differ between ranks that replicate them:\n{lines}\n"
            "their gradients differed between these ranks: check that the plan sums them over tp, that these ranks "
            "got the same batch, and that they started from the same weights"
        )


def _replica_groups(
    tensor: Tensor, mesh: DeviceMesh | None, different: tuple[str, ...]
) -> Iterator[tuple[str, ProcessGroup]]:
    """Yield the axes over which a tensor is replicated, with this rank's group on each."""
    own_axes: tuple[str, ...] = ()
    own_ranks: list[set[int]] = []  # of axes that may have been flattened from several, as dp_shard_cp
    if isinstance(tensor, DTensor):
        tensor_mesh = tensor.device_mesh
        own_axes = tensor_mesh.mesh_dim_names or ()
        own_ranks = [set(dist.get_process_group_ranks(group)) for group in tensor_mesh.get_all_groups()]
        for index, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate) and tensor_mesh.size(index) > 1:
                yield (own_axes[index] if own_axes else str(index)), tensor_mesh.get_group(index)
    if "ep" in own_axes:  # the expert mesh divides the ranks of these axes again
        own_axes += DIVIDED
    for index, axis in enumerate((mesh.mesh_dim_names if mesh is not None else None) or ()):
        if mesh is None or axis in (*own_axes, *different) or mesh.size(index) == 1:
            continue
        group = mesh.get_group(index)
        if not any(set(dist.get_process_group_ranks(group)) <= ranks for ranks in own_ranks):
            yield axis, group


def _hash(tensor: Tensor) -> Tensor:
    """Return the hash of the local bits, on the collectives' device."""
    bits = hash_bits(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    return bits.to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else bits
