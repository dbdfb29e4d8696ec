"""Device meshes with the axes that training uses, each present even at size 1."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_runtime._torch_compat import flatten_axes
from fsdp_runtime.errors import MeshError
from fsdp_runtime.mesh.rendezvous import rank_info_from_env, start_distributed

#: Flattened axes: all that divide the batch, all that shard parameters, all that split tokens.
FLATTENED: dict[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """The sizes of a mesh's axes, slowest-varying rank first; at most one may be -1 and is inferred.

    Args:
        dp_replicate: replicas of the sharded parameters (HSDP).
        dp_shard: ranks that parameters, gradients and optimizer state are sharded over (FSDP).
        cp: ranks that a sequence is split over in attention.
        tp: ranks that layers are split over; neighbours, so that they share the fastest links.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if type(size) is not int or (size < 1 and size != -1):
                raise MeshError(f"axis {axis} has size {size!r}: give a positive integer, or -1 to infer it")
        if (unknown := [axis for axis, size in self.sizes.items() if size == -1])[1:]:
            raise MeshError(f"axes {' and '.join(unknown)} are both -1: only one size can be inferred")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, in mesh order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def resolve(self, world_size: int) -> MeshSpec:
        """The spec with every size known, filling ``world_size`` ranks exactly.

        Raises:
            MeshError: the sizes do not fill the world; the message has the numbers and sizes that would.
        """
        known = math.prod(size for size in self.sizes.values() if size != -1)
        inferred = [axis for axis, size in self.sizes.items() if size == -1]
        if world_size % known or (known != world_size and not inferred):
            told = " x ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size != 1) or "all sizes 1"
            advice = (
                f"set one axis to -1, as dp_shard=-1, or start {known} ranks"
                if not inferred
                else f"the other sizes must divide {world_size}, and {known} does not"
            )
            raise MeshError(f"{told} does not fill the world of {world_size} ranks: {advice}")
        return replace(self, **dict.fromkeys(inferred, world_size // known))

    def build(self, *, device_type: str | None = None) -> DeviceMesh:
        """The ``DeviceMesh`` with all four axes, and flattened ``dp``, ``dp_shard_cp`` and ``dp_cp`` (see ``submesh``).

        Starts ``torch.distributed`` where it is not running yet: from torchrun's or Slurm's environment, or as a
        world of one process where there is neither.

        Args:
            device_type: ``"cuda"``, ``"cpu"``, …; by default the accelerator of this machine, else the CPU.

        Raises:
            MeshError: the sizes do not fill the world, or the environment says only half of what is needed.
        """
        device_type = device_type or default_device_type()
        launch = None if dist.is_initialized() else rank_info_from_env()
        spec = self.resolve(launch.world_size if launch else dist.get_world_size())  # before any group is made
        if launch is not None:
            start_distributed(launch, device_type)
        mesh = init_device_mesh(device_type, tuple(spec.sizes.values()), mesh_dim_names=tuple(spec.sizes))
        for name in FLATTENED:
            submesh(mesh, name)
        return mesh


def default_device_type() -> str:
    """This machine's accelerator, else ``"cpu"``."""
    # Builds for CUDA name it as their accelerator on machines without a GPU too.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def adopt_mesh(
    mesh: DeviceMesh,
    *,
    dp_replicate: str = "dp_replicate",
    dp_shard: str = "dp_shard",
    cp: str = "cp",
    tp: str = "tp",
) -> DeviceMesh:
    """Someone else's mesh under this package's names, over the same process groups.

    Args:
        mesh: a mesh with named axes, any subset of the four, in any order.
        dp_replicate: the name that the mesh gives to its axis of replicas, if it has one.
        dp_shard: its name for the axis that shards parameters; one that was flattened out of ``dp_shard`` and ``cp``
            will do, since ``cp`` is then 1 in what is returned.
        cp: its name for the context-parallel axis.
        tp: its name for the tensor-parallel axis.

    Returns:
        A mesh with all four axes, those that were missing of size 1.

    Raises:
        MeshError: the mesh has axes that no argument names, or lists its axes in another order than this package.
    """
    theirs = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    names = mesh.mesh_dim_names or ()
    if unknown := [name for name in names if name not in theirs.values()]:
        told = ", ".join(f"{ours}={name!r}" for ours, name in theirs.items())
        raise MeshError(
            f"the mesh has axes {', '.join(names)}, of which {', '.join(unknown)} bears none of the names given "
            f"({told}): say which is which, as adopt_mesh(mesh, tp={unknown[0]!r}), or pass a slice of the mesh"
        )
    if not names:
        raise MeshError(f"the mesh {tuple(mesh.shape)} has no axis names: build it with mesh_dim_names=(...)")
    order = [name for name in theirs.values() if name in names]
    if order != list(names):
        raise MeshError(f"the axes are in the order {', '.join(names)}; pass mesh[{', '.join(map(repr, order))}]")
    if mesh.get_coordinate() is None:
        raise MeshError(f"rank {dist.get_rank()} is not one of the ranks {mesh.mesh.flatten().tolist()} of the mesh")
    sizes = [mesh.size(names.index(name)) if name in names else 1 for name in theirs.values()]
    alone = None
    if 1 in sizes:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = [mesh.get_group(name) if name in names else alone for name in theirs.values()]
    adopted = DeviceMesh.from_group(
        groups,  # type: ignore[arg-type]  # no axis is left without a group
        mesh.device_type,
        mesh=mesh.mesh.view(sizes),
        mesh_dim_names=tuple(theirs),
    )
    for name in FLATTENED:
        submesh(adopted, name)
    return adopted


def submesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """One axis of a mesh, be it one of its own or a flattened one (``dp``, ``dp_shard_cp``, ``dp_cp``).

    Unlike ``mesh[axis]``, this serves flattened axes without the warning that torch gives from 2.11 on.  A mesh that
    lacks some of the axes that are flattened gives those that it has.

    Raises:
        MeshError: the mesh has no such axis, nor any that it is flattened from.
    """
    names = mesh.mesh_dim_names or ()
    if axis in names:
        return mesh[axis]
    parts = tuple(part for part in FLATTENED.get(axis, ()) if part in names)
    if not parts:
        raise MeshError(
            f"the mesh has no axis {axis!r}: its axes are {', '.join(names) or 'unnamed'}; adopt_mesh(mesh) "
            "gives it every axis, at size 1"
        )
    return flatten_axes(mesh, parts, axis) if len(parts) > 1 else mesh[parts[0]]


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """The size of one of the mesh's own axes, 1 where it has none of that name."""
    return mesh[axis].size() if axis in (mesh.mesh_dim_names or ()) else 1


def require_axes(mesh: DeviceMesh) -> None:
    """Raise :class:`MeshError` unless the mesh's axes are named as this package names them."""
    names = mesh.mesh_dim_names or ()
    known = [field.name for field in fields(MeshSpec)]
    if not names or (unknown := [name for name in names if name not in known]):
        told = f"axes {', '.join(unknown)}" if names else "unnamed axes"
        raise MeshError(
            f"the mesh has {told}; name them out of {', '.join(known)}, build it with MeshSpec(...), or rename them "
            "with adopt_mesh(...)"
        )
