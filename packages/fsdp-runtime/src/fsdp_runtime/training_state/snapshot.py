"""The tensors of a training state, and the chunks of them that each rank writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.sharded.chunks import Slices, local_part
from fsdp_runtime.sharded.collectives import ModelRanks
from fsdp_runtime.sharded.shard_offsets import shard_steps
from fsdp_runtime.training_state.optimizers import optimizer_tensors, parameter_names


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the training state under its name in the manifest."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class LocalChunk:
    """A chunk that this rank writes: its tensor's name, its slices of the full tensor, and the local data."""

    name: str
    slices: Slices
    local: Tensor


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return one optimizer, several or none as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def named_tensors(entries: Sequence[StateEntry], optimizers: Sequence[Optimizer]) -> list[NamedTensor]:
    """Return every tensor of the model and of the optimizers' state, in the same order on all ranks."""
    if on_meta := [entry.names[0] for entry in entries if entry.tensor.is_meta]:
        raise OptionError(f"{len(on_meta)} tensors are on the meta device, first {on_meta[0]}: load weights first")
    names = parameter_names(entries, optimizers)
    return [
        *(NamedTensor(f"model/{entry.names[0]}", entry.tensor) for entry in entries),
        *(
            NamedTensor(f"optimizer/{index}/{item.parameter}/{item.key}", item.tensor)
            for index, optimizer in enumerate(optimizers)
            for item in optimizer_tensors(optimizer, names)
        ),
    ]


def chunks_to_write(tensors: Sequence[NamedTensor], ranks: ModelRanks) -> Iterator[LocalChunk]:
    """Yield the chunks that this rank writes; over all ranks, every element is written once."""
    for index, named in enumerate(tensors):
        tensor = named.tensor.detach()
        if _writes(tensor, index, ranks):
            local, slices = local_part(tensor)
            if local.numel() or not tensor.numel():
                yield LocalChunk(named.name, slices, local)


def _writes(tensor: Tensor, index: int, ranks: ModelRanks) -> bool:
    """Assign replicated tensors to ranks round-robin, to balance the bytes that they write."""
    if not isinstance(tensor, DTensor):
        return index % ranks.count == ranks.index
    mesh = tensor.device_mesh
    if ranks.global_first not in mesh.mesh:  # another part of the model's mesh holds the same tensor
        return False
    sharded_axes = {step.axis for step in shard_steps(tensor.placements, mesh.shape)}
    replica, replicas = 0, 1
    for axis, coordinate in enumerate(mesh.get_coordinate() or ()):
        if axis not in sharded_axes:
            replica = replica * mesh.shape[axis] + coordinate
            replicas *= mesh.shape[axis]
    return index % replicas == replica
