"""Recognize collective operators: kind, ranks and bytes; name the mesh axis of a group of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._torch_compat import group_of, operator_name, tree_leaves
from fsdp_runtime.mesh.experts import expert_axis_size
from fsdp_runtime.mesh.spec import FLATTENED, submesh

_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor", "_c10d_functional_autograd")

#: Parts of operator names, in search order.
_KINDS = {
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "gather": "all_gather",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}


@dataclass(frozen=True)
class CollectiveCall:
    """One call of a collective."""

    kind: str
    ranks: tuple[int, ...]  # global ranks of the group
    nbytes: int  # of this rank's input
    kept: int | None = None  # bytes that stay on this rank, in a call with uneven parts

    @property
    def bytes_sent(self) -> int:
        """The least bytes that this rank sends."""
        return min_bytes_sent(self.kind, self.nbytes, len(self.ranks)) if self.kept is None else self.nbytes - self.kept


def collective_call(function: Any, args: Any, kwargs: Mapping[str, Any]) -> CollectiveCall | None:
    """Return the collective that an operator runs, functional or in place; ``None`` for other operators."""
    if function.namespace not in _NAMESPACES:
        return None
    name = operator_name(function)
    kind = next((kind for part, kind in _KINDS.items() if part in name), None)
    if kind is None:
        return None
    groups = (group_of(value) for value in (*args, *kwargs.values()))
    ranks = next((tuple(dist.get_process_group_ranks(group)) for group in groups if group is not None), ())
    tensors = [value for value in args if isinstance(value, (Tensor, list))]
    # In-place operators on one flat tensor take the output first; all other operators take the input first.
    inputs = tensors[1] if name.endswith("_base_") else tensors[0]
    nbytes = sum(leaf.nbytes for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    kept = None
    if name == "alltoall_base_" and isinstance(inputs, Tensor) and args[4]:  # the rows for each rank, if unequal
        kept = nbytes // max(inputs.shape[0], 1) * args[4][ranks.index(dist.get_rank())]
    return CollectiveCall(kind, ranks, nbytes, kept)


def axis_names(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """Return the axis of each group of ranks; mesh axes take precedence over flattened axes."""
    names = [*(mesh.mesh_dim_names or ()), *FLATTENED, *(("efsdp", "ep") if expert_axis_size(mesh) > 1 else ())]
    axes: dict[tuple[int, ...], str] = {}
    for name in names:
        axes.setdefault(tuple(submesh(mesh, name).mesh.flatten().tolist()), name)
    axes.setdefault(tuple(range(dist.get_world_size())), "world")
    return axes


def min_bytes_sent(kind: str, nbytes: int, ranks: int) -> int:
    """Return the least bytes that a rank sends, by the ring algorithm (Patarasuk and Yuan, 2009)."""
    if ranks < 2:
        return 0
    match kind:
        case "all_gather":
            return nbytes * (ranks - 1)
        case "all_reduce":
            return 2 * nbytes * (ranks - 1) // ranks
        case "reduce_scatter" | "all_to_all":
            return nbytes * (ranks - 1) // ranks
        case "recv":
            return 0
    return nbytes
