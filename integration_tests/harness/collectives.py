"""What a piece of code communicates: every collective with its kind, bytes and process group.

``CommDebugMode`` counts too, but keeps a stack of modules that FSDP2's hooks and frozen towers empty, and knows
neither bytes nor groups.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: The part of an operator's name that tells its kind, functional and in-place collectives alike.
_KINDS = {
    "gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}
_KINDS |= {"allreduce": "all_reduce", "all_reduce": "all_reduce", "broadcast": "broadcast", "send": "send"}


@dataclass(frozen=True)
class Collective:
    """One call.

    Args:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, …
        ranks: the global ranks of the process group.
        nbytes: bytes that this rank puts in.
    """

    kind: str
    ranks: tuple[int, ...]
    nbytes: int


class RecordCollectives(TorchDispatchMode):
    """Records the collectives that run inside the ``with``, in order, in ``calls``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come here afterwards
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            name = func._schema.name.split("::")[1]
            kind = next((kind for part, kind in _KINDS.items() if part in name), None)
            if kind is not None:
                self.calls.append(Collective(kind, _ranks(args, kwargs), _nbytes(name, args)))
        return func(*args, **(kwargs or {}))

    def counts(self) -> Counter[str]:
        """How often each kind was called."""
        return Counter(call.kind for call in self.calls)


def by_axis(calls: list[Collective], mesh: DeviceMesh) -> dict[str, dict[str, tuple[int, int]]]:
    """Calls and bytes by the axis of the mesh that they ran on, then by kind; elsewhere under their ranks."""
    names = {tuple(mesh[axis].mesh.flatten().tolist()): axis for axis in mesh.mesh_dim_names or ()}
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for call in calls:
        kinds = found.setdefault(names.get(call.ranks, str(call.ranks)), {})
        count, nbytes = kinds.get(call.kind, (0, 0))
        kinds[call.kind] = (count + 1, nbytes + call.nbytes)
    return found


def _ranks(args: Any, kwargs: Any) -> tuple[int, ...]:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return tuple(dist.get_process_group_ranks(ProcessGroup.unbox(value)))
        if isinstance(value, str):  # of a functional collective: a reduction's name, or the group's
            try:
                return tuple(dist.get_process_group_ranks(_resolve_process_group(value)))
            except (RuntimeError, ValueError, LookupError):
                continue
    return ()


def _nbytes(name: str, args: Any) -> int:
    """Of ``(output, input, group, …)`` the input, of ``(input, …)`` the same."""
    tensors = [arg for arg in args if isinstance(arg, (Tensor, list))]
    chosen = tensors[1] if name.endswith("_base_") else tensors[0]
    return sum(leaf.nbytes for leaf in tree_leaves(chosen) if isinstance(leaf, Tensor))
