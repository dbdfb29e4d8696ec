"""Device meshes with the axes that training uses, each present even at size 1."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_runtime._torch_compat import flatten_axes
from fsdp_runtime.errors import MeshError

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

        Starts ``torch.distributed`` where it is not running yet: from torchrun's environment, or as a world of
        one process where there is none.

        Args:
            device_type: ``"cuda"``, ``"cpu"``, …; by default the accelerator of this machine, else the CPU.

        Raises:
            MeshError: the sizes do not fill the world.
        """
        device_type = device_type or default_device_type()
        world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        spec = self.resolve(world_size)  # before any process group is made
        _start_distributed(device_type)
        mesh = init_device_mesh(device_type, tuple(spec.sizes.values()), mesh_dim_names=tuple(spec.sizes))
        for name in FLATTENED:
            submesh(mesh, name)
        return mesh


def default_device_type() -> str:
    """This machine's accelerator, else ``"cpu"``."""
    # Builds for CUDA name it as their accelerator on machines without a GPU too.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def submesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """One axis of a mesh, be it one of its own or a flattened one (``dp``, ``dp_shard_cp``, ``dp_cp``).

    Unlike ``mesh[axis]``, this serves flattened axes without the warning that torch gives from 2.11 on.
    """
    if axis in (mesh.mesh_dim_names or ()):
        return mesh[axis]
    if axis not in FLATTENED:
        raise MeshError(f"the mesh has no axis {axis!r}: its axes are {', '.join(mesh.mesh_dim_names or ())}")
    return flatten_axes(mesh, FLATTENED[axis], axis)


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """The size of one of the mesh's own axes, 1 where it has none of that name."""
    return mesh[axis].size() if axis in (mesh.mesh_dim_names or ()) else 1


def require_axes(mesh: DeviceMesh) -> None:
    """Raise :class:`MeshError` unless the mesh's axes are named as this package names them."""
    names = mesh.mesh_dim_names or ()
    known = [field.name for field in fields(MeshSpec)]
    if not names or (unknown := [name for name in names if name not in known]):
        told = f"axes {', '.join(unknown)}" if names else "unnamed axes"
        raise MeshError(f"the mesh has {told}; name them out of {', '.join(known)}, or build it with MeshSpec(...)")


def _start_distributed(device_type: str) -> None:
    if dist.is_initialized():
        return
    if device_type != "cpu" and "LOCAL_RANK" in os.environ:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    backend = "gloo"
    if device_type != "cpu":
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
