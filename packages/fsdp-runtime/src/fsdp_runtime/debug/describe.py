"""What became of a model: which modules were wrapped, recompute or are compiled, and how each parameter lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from fsdp_runtime._torch_compat import is_compiled
from fsdp_runtime.model.state import entries
from fsdp_runtime.parallel.activation_checkpoint import recomputes


@dataclass(frozen=True)
class ParallelReport:
    """The state of a model, read off it.

    Args:
        units: modules that FSDP2 gathers and frees as one, the root as ``""``.
        recomputing: modules that recompute their activations in backward.
        compiled: modules that are compiled in place.
        sharded: by parameter, the mesh axes that it is cut over.
        replicated: parameters that every rank holds whole.
        local_bytes: bytes of all parameters on this rank.
        full_bytes: bytes of all parameters of the model.
    """

    units: tuple[str, ...]
    recomputing: tuple[str, ...]
    compiled: tuple[str, ...]
    sharded: Mapping[str, tuple[str, ...]]
    replicated: tuple[str, ...]
    local_bytes: int
    full_bytes: int

    def __str__(self) -> str:
        axes = Counter(self.sharded.values())
        lines = [
            f"FSDP2 units: {_told(self.units)}",
            f"recomputing: {_told(self.recomputing)}",
            f"compiled: {_told(self.compiled)}",
            *(f"cut over {' and '.join(names)}: {count} parameters" for names, count in axes.items()),
            f"whole on every rank: {_told(self.replicated)}",
            f"bytes on this rank: {self.local_bytes:,} of {self.full_bytes:,}",
        ]
        return "\n".join(lines)


def parallel_report(model: nn.Module) -> ParallelReport:
    """Read off a model what ``parallelize``, or the same steps called alone, made of it; no communication.

    Args:
        model: any model, also one that something else wrapped.
    """
    modules = dict(model.named_modules())
    sharded: dict[str, tuple[str, ...]] = {}
    replicated: list[str] = []
    local_bytes = full_bytes = 0
    for entry in entries(model):
        if not isinstance(entry.tensor, nn.Parameter):
            continue
        axes = _cut_over(entry.tensor)
        for name in entry.names:
            if axes:
                sharded[name] = axes
            else:
                replicated.append(name)
        local = entry.tensor.to_local() if isinstance(entry.tensor, DTensor) else entry.tensor
        local_bytes += local.nbytes
        full_bytes += entry.tensor.numel() * entry.tensor.element_size()
    return ParallelReport(
        units=tuple(path for path, module in modules.items() if isinstance(module, FSDPModule)),
        recomputing=tuple(path for path, module in modules.items() if recomputes(module)),
        compiled=tuple(path for path, module in modules.items() if is_compiled(module)),
        sharded=sharded,
        replicated=tuple(replicated),
        local_bytes=local_bytes,
        full_bytes=full_bytes,
    )


def _cut_over(tensor: Tensor) -> tuple[str, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return tuple(
        name
        for axis, (name, placement) in enumerate(zip(names, tensor.placements, strict=True))
        if not isinstance(placement, Replicate) and mesh.size(axis) > 1
    )


def _told(names: tuple[str, ...]) -> str:
    shown = ", ".join(name or "(root)" for name in names[:3])
    return f"{len(names)} ({shown}{', …' if len(names) > 3 else ''})" if names else "none"
