"""The second view of a mesh: its ranks as ``efsdp`` x ``ep``, for experts.

The view divides the ranks of ``dp_shard x cp x tp`` again: ``ep`` neighbouring ranks together hold all experts.  There
are ``efsdp`` such groups, and FSDP2 shards each expert over ``efsdp``.  torchtitan and transformers use the same names.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fsdp_runtime.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The axes of the view, slowest-varying rank first; ``dp_replicate`` is also an axis of the mesh.
EXPERT_AXES = ("dp_replicate", "efsdp", "ep")
#: The mesh axes that the view divides again.
DIVIDED = ("dp_shard", "cp", "tp")

_VIEW = "_fsdp_runtime_expert_mesh"


def require_expert_size(ep: int, sizes: dict[str, int]) -> None:
    """Check that ``ep`` divides the ranks of ``dp_shard x cp x tp``."""
    ranks = math.prod(sizes[axis] for axis in DIVIDED)
    if ranks % ep:
        legal = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        product = " x ".join(f"{axis}={sizes[axis]}" for axis in DIVIDED)
        raise MeshError(f"ep={ep} does not divide the {ranks} ranks of {product}: use an ep out of {legal}")


def build_expert_mesh(mesh: DeviceMesh, ep: int) -> None:
    """Build the second view of a mesh with all axes; every rank of the world must call this function."""
    from torch.distributed.device_mesh import init_device_mesh

    *stages, replicas = tuple(mesh.shape)[: -len(DIVIDED)]
    sizes = (*stages, replicas, mesh.size() // math.prod((*stages, replicas, ep)), ep)
    names = (*(mesh.mesh_dim_names or ())[: len(stages)], *EXPERT_AXES)
    view = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=names)
    setattr(mesh, _VIEW, view[EXPERT_AXES] if stages else view)


def adopt_expert_mesh(mesh: DeviceMesh, view: DeviceMesh, names: dict[str, str]) -> None:
    """Use another program's expert mesh as a mesh's second view; ``names`` maps the axes to that program's names."""
    axes = view.mesh_dim_names or ()
    order = [name for name in names.values() if name in axes]
    if list(axes) != order or names["ep"] not in axes:
        raise MeshError(
            f"the expert mesh has axes {', '.join(axes) or 'without names'}: name some of {', '.join(EXPERT_AXES)}, "
            "in this order and with 'ep', as in adopt_mesh(mesh, expert_mesh=view, ep='expert')"
        )
    replicas = view.size(0) if names["dp_replicate"] in axes else 1
    ranks = mesh.mesh.view(mesh.size(0), -1).sort(dim=1).values
    adopted_ranks = view.mesh.reshape(replicas, -1).sort(dim=1).values
    if ranks.shape != adopted_ranks.shape or not bool((ranks == adopted_ranks).all()):
        raise MeshError(
            f"the expert mesh has ranks {view.mesh.tolist()} and the mesh {mesh.mesh.tolist()}: both must have the "
            "same ranks for every index of dp_replicate"
        )
    setattr(mesh, _VIEW, renamed_mesh(view, names))


def renamed_mesh(mesh: DeviceMesh, names: dict[str, str]) -> DeviceMesh:
    """Return ``mesh`` under new axis names (``names``: new to old), over the same groups; a missing axis has size 1."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_runtime._torch_compat import local_group

    axes = mesh.mesh_dim_names or ()
    sizes = [mesh.size(axes.index(name)) if name in axes else 1 for name in names.values()]
    single = local_group([dist.get_rank()]) if 1 in sizes else None
    groups: list[Any] = [mesh.get_group(name) if name in axes else single for name in names.values()]
    ranks = mesh.mesh.view(sizes)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=tuple(names))


def expert_view(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the second view of a mesh, or of the mesh that it was sliced from; ``None`` without a view."""
    from fsdp_runtime._torch_compat import root_mesh

    view: DeviceMesh | None = getattr(mesh, _VIEW, None) or getattr(root_mesh(mesh), _VIEW, None)
    if (
        view is not None
        and mesh.ndim <= len(DIVIDED) + 1
        and sorted(view.mesh.flatten().tolist()) != sorted(mesh.mesh.flatten().tolist())
    ):
        raise MeshError(
            f"the mesh has {mesh.size()} ranks, and the mesh that it was sliced from has experts over {view.size()} "
            "ranks: pass the whole mesh"
        )
    return view


def expert_axis_size(mesh: DeviceMesh) -> int:
    """Return the size of ``ep``, 1 without a second view."""
    view = expert_view(mesh)
    return 1 if view is None else view["ep"].size()


def expert_fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the part of the second view that FSDP2 shards experts over; ``None`` without a view."""
    view = expert_view(mesh)
    if view is None:
        return None
    return view["dp_replicate", "efsdp"] if view["dp_replicate"].size() > 1 else view["efsdp"]
