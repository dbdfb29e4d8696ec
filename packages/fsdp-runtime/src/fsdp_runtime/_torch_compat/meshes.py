"""Process groups and their collectives, axes of a mesh, and the layouts of tensors over them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.tensor import DTensor, Placement

from fsdp_runtime.swaps import swapped


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Flatten several axes of a mesh into one, registered under ``name``; a repeated call returns the same mesh."""
    # Only ranks of the mesh take part. torch's own tutorials and torchtitan use ``DeviceMesh._flatten``
    # (pytorch/pytorch#133838, and #159013 on a public form). Every rank of the world must call it to make groups, so a
    # mesh over a part of the world gets its group from this function.
    root, sliced = root_mesh(mesh), mesh[axes] if len(axes) > 1 else mesh[axes[0]]
    if name in root._flatten_mapping or root.size() == dist.get_world_size():
        return sliced._flatten(name)
    group = group_of_axes(sliced)
    with swapped(DeviceMesh, _init_process_groups=staticmethod(lambda *_: [group.group_name])):
        return sliced._flatten(name)


def group_of_axes(mesh: DeviceMesh) -> ProcessGroup:
    """Return the group of all ranks of a mesh: the group of its only axis larger than 1, else a new group."""
    groups = [group for group in mesh.get_all_groups() if dist.get_world_size(group) > 1]
    if len(groups) < 2:
        return groups[0] if groups else mesh.get_group(0)
    return local_group(mesh.mesh.flatten().tolist(), groups)


def local_group(ranks: list[int], connecting: Iterable[ProcessGroup] = (), **options: Any) -> ProcessGroup:
    """Make a process group on its global ranks only; this rank is among them."""
    # Ranks meet under a name with a rank's number of groups. So ranks in fewer groups
    # first make groups of one rank. The groups of ``connecting`` together connect the ranks, in the same order on every
    # rank. In a world that is bound to a device (``device_id`` of ``init_process_group``) torch splits the world's
    # communicator for a new group, and every rank of the world must take part. So the world is unbound meanwhile.
    most = _group_count()
    for link in connecting:
        counts = [0] * dist.get_world_size(link)
        dist.all_gather_object(counts, most, group=link)
        most = max(counts)
    with swapped(distributed_c10d._get_default_group(), bound_device_id=None):
        while _group_count() < most:
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return cast(ProcessGroup, dist.new_group(ranks, use_local_synchronization=True, **options))


def _group_count() -> int:
    return len(distributed_c10d._world.pg_names)


def all_gather_flat(output: Tensor, own: Tensor, group: ProcessGroup) -> dist.Work:
    """Start an all-gather of flat tensors; torch 2.13 renamed the function, and the old name warns."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(dist.Work, gather(output, own, group=group, async_op=True))


def reduce_scatter_flat(output: Tensor, full: Tensor, group: ProcessGroup) -> dist.Work:
    """Start a reduce-scatter of flat tensors; torch 2.13 renamed the function."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast(dist.Work, scatter(output, full, group=group, async_op=True))


def waited(tensor: Tensor) -> Tensor:
    """Return the result of an asynchronous functional collective, complete; other tensors unchanged."""
    # Local tensors of DTensors are such tensors.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    complete: Tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
    return complete


def clone_default_store() -> Store:
    """A new connection to the store of ``init_process_group``."""
    store: Any = distributed_c10d._get_default_store()
    return cast(Store, store.clone())


def separate_group(
    store: Store, rank: int, world_size: int, name: str, backend: str, timeout: timedelta
) -> ProcessGroup:
    """Form a group outside the world; ``ValueError`` for a used name, ``RuntimeError`` if ranks do not arrive."""
    # torch forms groups of the world's ranks only (pytorch/pytorch#151960); SGLang and OpenRLHF call the same function.
    # Point-to-point operations look up the ranks that are registered here.
    helper: Any = distributed_c10d._new_process_group_helper
    world: Any = distributed_c10d._world
    prefixed = PrefixStore(name, store)
    prefixed.set_timeout(timeout)
    group: ProcessGroup
    group, _ = helper(world_size, rank, [], backend, prefixed, group_name=f"separate/{name}", timeout=timeout)
    world.pg_group_ranks[group] = {number: number for number in range(world_size)}
    return group


def gloo_beneath(group: ProcessGroup, store: Store, timeout: timedelta, devices: list[str]) -> ProcessGroup:
    """Return a gloo group of the ranks of a group that is written in Python, and register gloo there for devices."""
    gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    beneath = ProcessGroup(store, group.rank(), group.size())
    for one, backend, names in ((beneath, "GLOO", ["cpu"]), (group, "CUSTOM", devices)):
        kind = getattr(ProcessGroup.BackendType, backend)
        one._set_default_backend(kind)
        for name in names:
            one._register_backend(torch.device(name), kind, gloo)
    return beneath


def group_of(value: object) -> ProcessGroup | None:
    """Return an operator's argument as a process group, if it is a group or a group's name, else ``None``."""
    if isinstance(value, ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return ProcessGroup.unbox(value)
    if isinstance(value, str):
        with suppress(RuntimeError, ValueError, LookupError):
            return cast("ProcessGroup", getattr(distributed_c10d, "_resolve_process_group")(value))  # noqa: B009
    return None


#: Inductor's switch for async tensor parallelism; torchtitan sets it too.
MICRO_PIPELINE = "_micro_pipeline_tp"


def enable_symmetric_memory(group: ProcessGroup) -> None:
    """Let ranks of a group read each other's memory."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group.group_name)


def join_axes(*meshes: DeviceMesh) -> DeviceMesh:
    """Concatenate meshes of one root; at least one mesh is a flattened axis."""
    # Slicing the root by the name of a flattened axis warns (pytorch/pytorch#164993, #169381).
    return DeviceMesh._concatenate(list(meshes))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` was sliced from, or itself (no upstream issue found)."""
    return mesh._get_root_mesh()


def is_strided(placement: Placement) -> bool:
    """Return True for ``_StridedShard``, FSDP2's placement of a dim that is already sharded over ``tp``."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor itself; a memory recorder would count the view from ``to_local`` again."""
    # Other tensors are returned unchanged.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
