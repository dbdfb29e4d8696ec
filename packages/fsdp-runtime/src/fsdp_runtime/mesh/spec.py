"""Device meshes with all axes of training; an unused axis has size 1."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fsdp_runtime.errors import MeshError
from fsdp_runtime.mesh.experts import (
    EXPERT_AXES,
    adopt_expert_mesh,
    build_expert_mesh,
    expert_view,
    renamed_mesh,
    require_expert_size,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Functions import torch here, because the command line checks meshes before torch is imported.

#: The axes of a mesh, slowest-varying rank first.
AXES = ("dp_replicate", "dp_shard", "cp", "tp")
#: The axis of pipeline stages, slower than all others; a mesh has it only where it is used.
PIPELINE = "pp"
#: Flattened axes: ``dp`` shards the batch, ``dp_shard_cp`` parameters, ``dp_cp`` tokens.
FLATTENED: dict[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}
#: The attribute of a mesh with its one-axis slices, by name.
_KEPT_AXES = "_fsdp_runtime_axes"


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """The sizes of a mesh's axes, slowest-varying rank first; one size may be -1 and is inferred.

    Args:
        dp_replicate: number of replicas of the sharded parameters (HSDP).
        dp_shard: number of ranks that parameters, gradients and optimizer state are sharded over (FSDP2).
        cp: number of ranks that a sequence is sharded over (context parallelism).
        tp: number of ranks that layers are sharded over (tensor parallelism); neighbouring ranks, which share the
            fastest links.
        pp: number of ranks that blocks are divided over (pipeline parallelism), the slowest-varying axis.  The mesh has
            the axis only where its size is not 1.
        ep: number of ranks that experts are divided over (expert parallelism).  A second view divides the ranks
            of ``dp_shard x cp x tp``: ``ep`` neighbouring ranks together hold all experts, and ``efsdp`` such groups
            hold the same experts.  ``ep`` may be smaller than ``tp``, equal or larger; 1 divides no experts.

    Raises:
        MeshError: a size is not a positive integer or -1, more than one is -1, or ``ep`` is not a positive integer.

    Example:
        >>> from fsdp_runtime import MeshSpec
        >>> MeshSpec(dp_shard=-1, tp=2).resolve(world_size=8)
        MeshSpec(dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1, pp=1)
        >>> MeshSpec().build(device_type="cpu").mesh_dim_names
        ('dp_replicate', 'dp_shard', 'cp', 'tp')
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis, size in {"ep": self.ep, **self.sizes}.items():
            inferred = "" if axis == "ep" else ", or -1 to infer it"
            if type(size) is not int or (size < 1 and (size != -1 or not inferred)):
                raise MeshError(f"axis {axis} has size {size!r}: give a positive integer{inferred}")
        if (unknown := [axis for axis, size in self.sizes.items() if size == -1])[1:]:
            raise MeshError(f"axes {' and '.join(unknown)} are both -1: only one size can be inferred")

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by axis name, in mesh order, without ``ep``, which divides the same ranks again, and a ``pp`` of 1."""
        return {**({} if self.pp == 1 else {PIPELINE: self.pp}), **{axis: getattr(self, axis) for axis in AXES}}

    def resolve(self, world_size: int) -> MeshSpec:
        """Return the spec with every size known and a product of ``world_size`` ranks.

        Raises:
            MeshError: the sizes do not fill the world, or ``ep`` does not divide the ranks; the message has valid
                sizes.
        """
        known = math.prod(size for size in self.sizes.values() if size != -1)
        inferred = [axis for axis, size in self.sizes.items() if size == -1]
        if world_size % known or (known != world_size and not inferred):
            sizes = " x ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size != 1) or "all sizes 1"
            advice = (
                f"set one axis to -1, such as dp_shard=-1, or start {known} ranks"
                if not inferred
                else f"the other sizes must divide {world_size}, and {known} does not"
            )
            raise MeshError(f"{sizes} does not fill the world of {world_size} ranks: {advice}")
        resolved = replace(self, **dict.fromkeys(inferred, world_size // known))
        require_expert_size(self.ep, resolved.sizes)
        return resolved

    def build(self, *, device_type: str | None = None) -> DeviceMesh:
        """Build the ``DeviceMesh`` with all four axes, ``pp`` in front where its size is not 1, and flattened axes.

        Starts ``torch.distributed`` if it is not running, from torchrun's or Slurm's environment, else as one process.
        :func:`submesh` returns the flattened ``dp``, ``dp_shard_cp`` and ``dp_cp``.

        Args:
            device_type: ``"cuda"``, ``"cpu"``, …; by default the accelerator of this machine, else the CPU.

        Raises:
            MeshError: the sizes do not fill the world, or environment variables are missing.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from fsdp_runtime.mesh.rendezvous import rank_info_from_env, start_distributed

        default = default_device_type()
        device_type = device_type or default
        if device_type not in ("cpu", "meta", default):
            here = " and ".join(sorted({"cpu", default}))
            raise MeshError(f"device_type={device_type!r}: this machine has {here}")
        info = None if dist.is_initialized() else rank_info_from_env()
        spec = self.resolve(info.world_size if info else dist.get_world_size())  # before any group is made
        if info is not None:
            start_distributed(info, device_type)
        mesh = init_device_mesh(device_type, tuple(spec.sizes.values()), mesh_dim_names=tuple(spec.sizes))
        for name in FLATTENED:
            submesh(mesh, name)
        if spec.ep > 1:
            build_expert_mesh(mesh, spec.ep)
        return mesh


def default_device_type() -> str:
    """Return the type of this machine's accelerator, or ``"cpu"``."""
    import torch

    # CUDA builds of torch name CUDA as the accelerator also on machines without a GPU.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def adopt_mesh(
    mesh: DeviceMesh,
    *,
    dp_replicate: str = "dp_replicate",
    dp_shard: str = "dp_shard",
    cp: str = "cp",
    tp: str = "tp",
    pp: str = "pp",
    expert_mesh: DeviceMesh | None = None,
    efsdp: str = "efsdp",
    ep: str = "ep",
) -> DeviceMesh:
    """Return an existing mesh with all four axes of this package, over the same process groups.

    Args:
        mesh: a mesh with named axes, any subset of the four, in the order of ``MeshSpec``; missing axes get size 1.
        dp_replicate: the mesh's name for the axis of replicas.
        dp_shard: its name for the axis that shards parameters; an axis flattened from ``dp_shard`` and ``cp`` is
            accepted, and ``cp`` is then 1 in the result.
        cp: its name for the context-parallel axis.
        tp: its name for the tensor-parallel axis.
        pp: its name for the axis of pipeline stages; the result has the axis only where the mesh has it.
        expert_mesh: another mesh over the same ranks, with axes for experts: any subset of ``dp_replicate``, ``efsdp``
            and ``ep``, in this order.
        efsdp: the expert mesh's name for the axis that shards experts.
        ep: its name for the expert-parallel axis.

    Raises:
        MeshError: the mesh has an axis that no argument names, its axes are in another order, or this rank is not in
            the mesh.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from fsdp_runtime import MeshSpec, adopt_mesh
        >>> _ = MeshSpec().build(device_type="cpu")  # starts torch.distributed
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "model"))
        >>> adopt_mesh(mesh, dp_shard="fsdp", tp="model").mesh_dim_names
        ('dp_replicate', 'dp_shard', 'cp', 'tp')
    """
    import torch.distributed as dist

    require_mesh(mesh)
    renames = {PIPELINE: pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    names = mesh.mesh_dim_names or ()
    if unknown := [name for name in names if name not in renames.values()]:
        arguments = ", ".join(f"{axis}={name!r}" for axis, name in renames.items())
        raise MeshError(
            f"the mesh has axes {', '.join(names)}, and {', '.join(unknown)} matches none of the arguments "
            f"({arguments}): name each axis, as in adopt_mesh(mesh, tp={unknown[0]!r}), or pass a slice of the mesh"
        )
    if not names:
        raise MeshError(f"the mesh {tuple(mesh.shape)} has no axis names: build it with mesh_dim_names=(...)")
    order = [name for name in renames.values() if name in names]
    if order != list(names):
        raise MeshError(f"the axes are in the order {', '.join(names)}; pass mesh[{', '.join(map(repr, order))}]")
    if mesh.get_coordinate() is None:
        raise MeshError(f"rank {dist.get_rank()} is not one of the ranks {mesh.mesh.flatten().tolist()} of the mesh")
    if pp not in names:
        del renames[PIPELINE]
    adopted = renamed_mesh(mesh, renames)
    for name in FLATTENED:
        submesh(adopted, name)
    if expert_mesh is not None:
        require_mesh(expert_mesh)
        adopt_expert_mesh(adopted, expert_mesh, dict(zip(EXPERT_AXES, (dp_replicate, efsdp, ep), strict=True)))
    return adopted


def submesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return one axis of a mesh: a mesh axis, ``ep``, ``efsdp``, or flattened (``dp``, ``dp_shard_cp``, ``dp_cp``).

    A flattened axis consists of its parts in the mesh.  Unlike ``mesh[axis]``, this returns it without the warning of
    torch 2.11 and later.

    Raises:
        MeshError: the mesh has neither the axis nor a part of it.

    Example:
        >>> from fsdp_runtime import MeshSpec, submesh
        >>> submesh(MeshSpec().build(device_type="cpu"), "dp").size()
        1
    """
    from fsdp_runtime._torch_compat import flatten_axes

    require_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    if axis in names:
        return _axis(mesh, axis)
    if axis in EXPERT_AXES and (view := expert_view(mesh)) is not None:
        return view[axis]
    parts = tuple(part for part in FLATTENED.get(axis, ()) if part in names)
    if not parts:
        advice = "build it with MeshSpec(..., ep=N)" if axis in EXPERT_AXES else "adopt_mesh(mesh) gives it every axis"
        raise MeshError(f"the mesh has no axis {axis!r}: its axes are {', '.join(names) or 'unnamed'}; {advice}")
    return flatten_axes(mesh, parts, axis) if len(parts) > 1 else _axis(mesh, parts[0])


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of a mesh that FSDP2 shards over, two axes (replicas, shards) for HSDP, or ``None`` without both.

    Ranks of ``cp`` hold shards too: a rank computes part of the tokens, and the ranks' gradients are summed.

    Raises:
        MeshError: the mesh has ``dp_replicate`` but no ``dp_shard``.

    Example:
        >>> from fsdp_runtime import MeshSpec
        >>> from fsdp_runtime.mesh import fsdp_mesh
        >>> fsdp_mesh(MeshSpec().build(device_type="cpu")).mesh_dim_names
        ('dp_shard',)
    """
    from fsdp_runtime._torch_compat import join_axes

    names = mesh.mesh_dim_names or ()
    if axis_size(mesh, "cp") > 1:
        shards = submesh(mesh, "dp_shard_cp")
    elif "dp_shard" in names:
        shards = mesh["dp_shard"]
    elif "dp_replicate" in names:
        raise MeshError("the mesh has dp_replicate but no dp_shard: add dp_shard, of size 1 for replicas only")
    else:
        return None
    return join_axes(mesh["dp_replicate"], shards) if axis_size(mesh, "dp_replicate") > 1 else shards


def _axis(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return an axis of a mesh, the same object each time."""
    # DTensor caches a layout with the first mesh object that has it, and compiled code guards on that object: on an
    # equal mesh, the blocks of a second model would be compiled again.
    known: dict[str, DeviceMesh] = mesh.__dict__.setdefault(_KEPT_AXES, {})
    if axis not in known:
        known[axis] = mesh[axis]
    return known[axis]


def require_mesh(mesh: object) -> None:
    """Check that a value is a device mesh."""
    if not hasattr(mesh, "mesh_dim_names"):
        raise MeshError(
            f"mesh is of type {type(mesh).__name__}, not a DeviceMesh: build one with MeshSpec(...).build()"
        )


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Return the size of an axis, 1 if the mesh does not have it."""
    require_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def require_axes(mesh: DeviceMesh, *, stages: bool = True) -> None:
    """Check the axis names of a mesh; without ``stages`` it must not have pipeline stages."""
    require_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    if PIPELINE in names and not stages:
        raise MeshError(
            f"the mesh has pp={mesh[PIPELINE].size()}, and a trainer calls the whole model: use a mesh without pp, "
            "Trainer or SFTTrainer, or forward_backward of fsdp_runtime.steps in your loop"
        )
    if not names or (unknown := [name for name in names if name not in (PIPELINE, *AXES)]):
        axes = f"axes {', '.join(unknown)}" if names else "unnamed axes"
        raise MeshError(
            f"the mesh has {axes}; name them out of {', '.join(AXES)}, build it with MeshSpec(...), or rename them "
            "with adopt_mesh(...)"
        )
