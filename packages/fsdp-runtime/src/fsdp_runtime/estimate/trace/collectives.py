"""Collectives as operators: which they are, over which ranks, with how many bytes; and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._torch_compat import group_of, leaves
from fsdp_runtime.estimate.types import PHASES, Phase, Traffic
from fsdp_runtime.mesh.spec import FLATTENED, submesh

_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor", "_c10d_functional_autograd")

#: Parts of operators' names, in the order in which they are looked for; ``all_reduce`` is part of no other.
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
class Collective:
    """One call.

    Args:
        kind: ``"all_gather"``, …
        ranks: the ranks of the group in the world.
        nbytes: bytes that this rank puts in.
    """

    kind: str
    ranks: tuple[int, ...]
    nbytes: int


def collective_of(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Collective | None:
    """The collective that an operator is, functional or in place; ``None`` for all others."""
    if function.namespace not in _NAMESPACES:
        return None
    name = _name(function)
    kind = next((kind for part, kind in _KINDS.items() if part in name), None)
    if kind is None:
        return None
    groups = (group_of(value) for value in (*args, *kwargs.values()))
    ranks = next((_ranks(group) for group in groups if group is not None), ())
    tensors = [value for value in args if isinstance(value, (Tensor, list))]
    # In place, the result comes first where it is one flat tensor; as lists, own tensors come second too.
    own = tensors[1] if name.endswith("_base_") else tensors[0]
    return Collective(kind, ranks, sum(leaf.nbytes for leaf in leaves(own) if isinstance(leaf, Tensor)))


def traffic_of(
    collectives: Counter[tuple[Phase, str, tuple[int, ...]]],
    nbytes: Mapping[tuple[Phase, str, tuple[int, ...]], int],
    mesh: DeviceMesh,
    bandwidths: Mapping[str, float],
) -> tuple[Traffic, ...]:
    """Counts and bytes by axis, phase and kind, in that order.

    Args:
        collectives: calls by phase, kind and ranks.
        nbytes: bytes that this rank puts in, by the same.
        mesh: whose axes the ranks are.
        bandwidths: bytes a second by axis; under ``""`` for all others.
    """
    axes = axis_names(mesh)
    found = []
    for key, count in collectives.items():
        phase, kind, ranks = key
        axis = axes.get(ranks, "ranks " + ",".join(map(str, ranks[:4])) + (",…" if len(ranks) > 4 else ""))
        moved = bytes_moved(kind, nbytes[key], len(ranks))
        speed = bandwidths.get(axis, bandwidths.get(""))
        found.append(
            Traffic(
                axis=axis,
                ranks=len(ranks),
                phase=phase,
                kind=kind,
                count=count,
                nbytes=nbytes[key],
                moved=moved,
                seconds=None if speed is None else moved / speed,
            )
        )
    order = list(dict.fromkeys(axes.values()))
    rank = {axis: place for place, axis in enumerate(order)}
    return tuple(sorted(found, key=lambda t: (rank.get(t.axis, len(order)), t.axis, PHASES.index(t.phase), t.kind)))


def axis_names(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """The axis that a group of ranks is; a mesh's own axes before flattened ones, those of size 1 last."""
    names = [*(mesh.mesh_dim_names or ()), *FLATTENED]
    found: dict[tuple[int, ...], str] = {}
    for name in names:
        found.setdefault(tuple(submesh(mesh, name).mesh.flatten().tolist()), name)
    found.setdefault(tuple(range(dist.get_world_size())), "world")
    return found


def bytes_moved(kind: str, nbytes: int, ranks: int) -> int:
    """Bytes that must leave a rank at least, by the ring algorithm (Patarasuk and Yuan, 2009)."""
    if ranks < 2:
        return 0
    match kind:
        case "all_gather":
            return nbytes * (ranks - 1)
        case "all_reduce":
            return 2 * nbytes * (ranks - 1) // ranks
        case "reduce_scatter" | "all_to_all":
            return nbytes * (ranks - 1) // ranks
    return nbytes


def _name(function: Any) -> str:
    return str(function.name()).split("::")[1].split(".")[0]


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
