"""Axes of a mesh, and the layouts of tensors over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Flatten several axes of a mesh into one, registered under ``name``; a repeated call returns the same mesh."""
    # Only ranks of the mesh take part. ``DeviceMesh._flatten`` has no public equivalent in torch 2.11 to 2.15; torch's
    # own tutorials and torchtitan use it (pytorch/pytorch#133838, and #159013 on a public form). Every rank of the
    # world must call it to make groups, so a mesh over a part of the world gets its group from this function.
    root, sliced = root_mesh(mesh), mesh[axes] if len(axes) > 1 else mesh[axes[0]]
    if name in root._flatten_mapping or root.size() == dist.get_world_size():
        return sliced._flatten(name)
    group = group_of_axes(sliced)
    make_groups = DeviceMesh._init_process_groups
    existing = staticmethod(lambda *_: [group.group_name])
    DeviceMesh._init_process_groups = existing  # type: ignore[method-assign, assignment]
    try:
        return sliced._flatten(name)
    finally:
        DeviceMesh._init_process_groups = staticmethod(make_groups)  # type: ignore[method-assign]


def group_of_axes(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh: the group of its only axis larger than 1, else a new group."""
    groups = [group for group in mesh.get_all_groups() if dist.get_world_size(group) > 1]
    if len(groups) < 2:
        return groups[0] if groups else mesh.get_group(0)
    return local_group(mesh.mesh.flatten().tolist(), groups)


def local_group(ranks: list[int], connecting: Iterable[dist.ProcessGroup] = (), **options: Any) -> dist.ProcessGroup:
    """Make a process group on its global ranks only; this rank is among them."""
    # Ranks meet under a name with a rank's number of groups (private in torch 2.11 to 2.15). So ranks in fewer groups
    # first make groups of one rank. The groups of ``connecting`` together connect the ranks, in the same order on every
    # rank. In a world that is bound to a device (``device_id`` of ``init_process_group``) torch splits the world's
    # communicator for a new group, and every rank of the world must take part. So the world is unbound meanwhile.
    most = _group_count()
    for link in connecting:
        counts = [0] * dist.get_world_size(link)
        dist.all_gather_object(counts, most, group=link)
        most = max(counts)
    world = distributed_c10d._get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        while _group_count() < most:
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, **options)
        return group
    finally:
        world.bound_device_id = bound


def _group_count() -> int:
    return len(distributed_c10d._world.pg_names)


def join_axes(*meshes: DeviceMesh) -> DeviceMesh:
    """Concatenate meshes of one root; at least one mesh is a flattened axis."""
    # Slicing the root by the name of a flattened axis warns from torch 2.11 on (pytorch/pytorch#164993, #169381), and
    # 2.11 to 2.15 have no public replacement.
    return DeviceMesh._concatenate(list(meshes))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` was sliced from, or itself (not public in torch 2.11 to 2.15; no issue found)."""
    return mesh._get_root_mesh()


def is_strided(placement: Placement) -> bool:
    """Return True for ``_StridedShard``, FSDP2's placement of a dim that is already sharded over ``tp``."""
    # The class is private in torch 2.11 to 2.15, where parameters of TP x FSDP2 carry it.
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor itself; a memory recorder would count the view from ``to_local`` again."""
    # Other tensors are returned unchanged (torch 2.11 to 2.15).
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
