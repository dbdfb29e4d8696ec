"""What a piece of code communicates: every collective with its kind, bytes and process group.

``CommDebugMode`` counts too, but keeps a stack of modules that FSDP2's hooks and frozen towers empty, and knows
neither bytes nor groups.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
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
_KINDS |= {"allreduce": "all_reduce", "all_reduce": "all_reduce", "broadcast": "broadcast"}


@dataclass(frozen=True)
class Collective:
    """One call.

    Args:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, …
        group: the name of the process group.
        nbytes: bytes that this rank puts in.
    """

    kind: str
    group: str
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
                self.calls.append(Collective(kind, _group(args, kwargs), _nbytes(name, args)))
        return func(*args, **(kwargs or {}))

    def counts(self) -> Counter[str]:
        """How often each kind was called."""
        return Counter(call.kind for call in self.calls)


def by_axis(calls: list[Collective], mesh: DeviceMesh, axes: dict[str, DeviceMesh]) -> dict[str, dict[str, Any]]:
    """Calls and bytes by the axis whose group they ran on, then by kind."""
    names = {axis.get_group().group_name: label for label, axis in axes.items()}
    found: dict[str, dict[str, Any]] = {}
    for call in calls:
        kinds = found.setdefault(names.get(call.group, call.group), {})
        count, nbytes = kinds.get(call.kind, (0, 0))
        kinds[call.kind] = (count + 1, nbytes + call.nbytes)
    return found


def _group(args: Any, kwargs: Any) -> str:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return ProcessGroup.unbox(value).group_name
    names = [value for value in args if isinstance(value, str) and value not in ("sum", "avg", "max", "min")]
    return names[-1] if names else ""


def _nbytes(name: str, args: Any) -> int:
    """Of ``(output, input, group, …)`` the input, of ``(input, …)`` the same."""
    tensors = [arg for arg in args if isinstance(arg, (Tensor, list))]
    chosen = tensors[1] if name.endswith("_base_") else tensors[0]
    return sum(leaf.nbytes for leaf in tree_leaves(chosen) if isinstance(leaf, Tensor))
