"""Describe a parallelized model: FSDP modules, recomputed and compiled modules, and each parameter's sharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from fsdp_runtime.model.state import state_entries
from fsdp_runtime.runtime_state import RUNTIME_STATE
from fsdp_runtime.steps.compiled_blocks import is_compiled
from fsdp_runtime.steps.recomputation import recomputes
from fsdp_runtime.weights.quantize.packed import packed_weight
from fsdp_runtime.wrap import effects_of


@dataclass(frozen=True)
class ParallelismReport:
    """The parallelism of a model, read from the model itself."""

    fsdp_modules: tuple[str, ...]  # modules that FSDP2 gathers and frees as one group, the root as ``""``
    recomputing: tuple[str, ...]  # modules that recompute their activations in backward
    compiled: tuple[str, ...]  # modules that are compiled in place
    # the kernel of each attention module over packed rows or ``cp``: ``"varlen"``, ``"flex"``, ``"batches"`` of
    # documents, ``"tiles"`` of a ring, or ``"mask"``, which holds a mask of all pairs of tokens
    attention: Mapping[str, str]
    wrapped: Mapping[str, tuple[str, ...]]  # the wrappers around the forward of a module, the outermost first
    sharded: Mapping[str, tuple[str, ...]]  # the mesh axes that each sharded parameter is sharded over
    replicated: tuple[str, ...]  # parameters that are replicated over all axes
    local_bytes: int  # bytes of all parameters on this rank
    full_bytes: int  # bytes of all parameters of the model
    # the format of each weight in packed bytes, such as ``"nf4, blocks of 64"``
    quantized: Mapping[str, str] = field(default_factory=dict)
    # the matrices that keep their dtype beside a quantized base or float8 layers, with the reason
    not_quantized: Mapping[str, str] = field(default_factory=dict)
    # the first and the last block of each pipeline stage on this rank, by its number; parameters and bytes are of these
    # stages
    stages: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        axes, wrapped = Counter(self.sharded.values()), Counter(self.wrapped.values())
        lines = [
            f"FSDP modules: {_summary(self.fsdp_modules)}",
            f"recomputing: {_summary(self.recomputing)}",
            f"compiled: {_summary(self.compiled)}",
            *(
                f"attention by {kernel}: {_summary(tuple(path for path, by in self.attention.items() if by == kernel))}"
                for kernel in dict.fromkeys(self.attention.values())
            ),
            *(f"in front of the forward of {n} modules: {', then '.join(effects)}" for effects, n in wrapped.items()),
            *(f"sharded over {' and '.join(names)}: {count} parameters" for names, count in axes.items()),
            *(f"pipeline stage {stage}: blocks {first} to {last}" for stage, (first, last) in self.stages.items()),
            f"replicated on every rank{' of the stage' if self.stages else ''} (all axes): {_summary(self.replicated)}",
            *(f"{count} weights in packed bytes: {fmt}" for fmt, count in Counter(self.quantized.values()).items()),
            *(f"{count} not quantized: {reason}" for reason, count in Counter(self.not_quantized.values()).items()),
            f"bytes on this rank: {self.local_bytes:,} of {self.full_bytes:,}",
        ]
        return "\n".join(lines)


def describe_parallelism(model: nn.Module) -> ParallelismReport:
    """Return the wrapped, recomputing and compiled modules, and the sharding of each parameter.

    The description is read from the model, so it also covers models that other code parallelized.  No communication.
    The ``str()`` of the report is a summary of a few lines.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import describe_parallelism
        >>> report = describe_parallelism(nn.Linear(2, 3))
        >>> report.replicated, report.local_bytes
        (('weight', 'bias'), 36)
    """
    modules, state = dict(model.named_modules()), model.__dict__.get(RUNTIME_STATE)
    sharded: dict[str, tuple[str, ...]] = {}
    replicated: list[str] = []
    quantized: dict[str, str] = {}
    local_bytes = full_bytes = 0
    for entry in state_entries(model, allow_offloaded=True):
        if not isinstance(entry.tensor, nn.Parameter):
            continue
        axes = _sharded_axes(entry.tensor)
        if (packed := packed_weight(entry)) is not None:
            quantized[entry.names[0]] = f"{packed.format.kind}, blocks of {packed.format.block}"
        for name in entry.names:
            if axes:
                sharded[name] = axes
            else:
                replicated.append(name)
        local = entry.tensor.to_local() if isinstance(entry.tensor, DTensor) else entry.tensor
        local_bytes += local.nbytes
        full_bytes += entry.tensor.numel() * entry.tensor.element_size()
    return ParallelismReport(
        fsdp_modules=tuple(path for path, module in modules.items() if isinstance(module, FSDPModule)),
        recomputing=tuple(path for path, module in modules.items() if recomputes(module)),
        compiled=tuple(path for path, module in modules.items() if is_compiled(module)),
        attention={} if state is None or state.attention is None else dict(state.attention.by_path),
        wrapped={path: effects for path, module in modules.items() if (effects := effects_of(module))},
        sharded=sharded,
        replicated=tuple(replicated),
        local_bytes=local_bytes,
        full_bytes=full_bytes,
        quantized=quantized,
        not_quantized={} if state is None else state.not_quantized,
        stages={} if state is None or state.stages is None else state.stages.blocks_by_stage,
    )


def _sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return tuple(
        name
        for axis, (name, placement) in enumerate(zip(names, tensor.placements, strict=True))
        if not isinstance(placement, Replicate) and mesh.size(axis) > 1
    )


def _summary(names: tuple[str, ...]) -> str:
    shown = ", ".join(name or "(root)" for name in names[:3])
    return f"{len(names)} ({shown}{', …' if len(names) > 3 else ''})" if names else "none"
