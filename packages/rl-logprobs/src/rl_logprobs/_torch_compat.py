"""Every use of a torch API that torch does not document as public, with the reason for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _disable_current_modes


def local_shape_and_offset(
    tensor: DTensor, placements: Sequence[Placement] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """This rank's extent of ``tensor`` in every dim, and where it begins in the full tensor.

    ``placements`` are the tensor's own unless given.

    torch 2.10 to 2.15 have no public function that answers this for every placement (strided shards
    included); distributed checkpointing uses the same one.
    """
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, placements or tensor.placements
    )
    return tuple(shape), tuple(offset)


def same_root(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether two meshes are slices of one mesh (torch 2.10 to 2.15: no public way to ask)."""
    return bool(mesh._get_root_mesh() == other._get_root_mesh())


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Fail on the device if ``condition`` is false, without the host waiting (torch 2.10 to 2.15)."""
    torch._assert_async(condition, message)


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``, which torch leaves without a type."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def foreach_norm(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each tensor in few kernel launches, accumulated and returned in ``dtype``.

    ``torch.nn.utils.get_total_norm`` is built on the same function but only returns the total.
    """
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Scale every tensor in place by a 0-d tensor, in few kernel launches."""
    torch._foreach_mul_(list(tensors), factor)


def all_gather_into(gathered: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``gathered`` with the ranks' parts; torch 2.13 renamed the function and warns of the old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, part, group=group)


_joint_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup | None]] = (
    WeakKeyDictionary()
)


def joint_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of all ranks of a mesh, made by those ranks alone at their first call; None if they cannot.

    torch 2.10 to 2.15 have no public group over several dims of a mesh.  A world bound to a device (``device_id`` of
    ``init_process_group``) splits its communicator for a new group, and for that it needs every rank.  Elsewhere the
    ranks meet under a name that holds how many groups each belongs to: where one is in more groups than another
    (pipeline stages with a group of their own, say), they would wait for each other under different names.
    """
    world = dist.group.WORLD
    if world is None or getattr(world, "bound_device_id", None) is not None:
        return None
    ranks = tuple(sorted(ranks_of(mesh)))
    known = _joint_groups.setdefault(world, {})
    if ranks not in known:
        with _disable_current_modes():
            agreed = _same_everywhere(len(distributed_c10d._world.pg_names), mesh)
            known[ranks] = dist.new_group(list(ranks), use_local_synchronization=True) if agreed else None
    return known[ranks]


_known_ranks: WeakKeyDictionary[DeviceMesh, frozenset[int]] = WeakKeyDictionary()


def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    """The mesh's ranks, remembered: torch computes them anew each time, as long as ten small gradients take.

    Outside any mode: under fake tensors (torch 2.10 to 2.15) a mesh computes its ranks as tensors without values.
    """
    if mesh not in _known_ranks:
        with _disable_current_modes():
            _known_ranks[mesh] = frozenset(mesh.mesh.flatten().tolist())
    return _known_ranks[mesh]


def _same_everywhere(number: int, mesh: DeviceMesh) -> bool:
    """Whether all ranks of a mesh hold the same number, asked along one dim after the other."""
    bounds = torch.tensor([number, -number], device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    most, least = bounds.tolist()
    return bool(most == -least)


def wide_product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``left @ right`` in ``dtype``, also from half precision (CUDA only; torch 2.10 to 2.15, untyped there)."""
    if left.dtype == dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype)


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right`` in ``total``'s dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += wide_product(left, right, total.dtype)
