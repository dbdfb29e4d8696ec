"""The tensors of a training state, and the chunks of them that each rank writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.sharded.chunks import local_part
from fsdp_runtime.sharded.collectives import ModelRanks
from fsdp_runtime.sharded.shard_offsets import shard_steps
from fsdp_runtime.training_state.optimizers import optimizer_tensors, parameter_names
from tp_plans.transfer import Box


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return one optimizer, several or none as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def named_tensors(entries: Sequence[StateEntry], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return every tensor by its name in the manifest, in the same order on all ranks."""
    if on_meta := [entry.names[0] for entry in entries if entry.tensor.is_meta]:
        raise OptionError(f"{len(on_meta)} tensors are on the meta device, first {on_meta[0]}: load weights first")
    names = parameter_names(entries, optimizers)
    tensors = {f"model/{entry.names[0]}": entry.tensor for entry in entries}
    for index, optimizer in enumerate(optimizers):
        for item in optimizer_tensors(optimizer, names):
            tensors[f"optimizer/{index}/{item.parameter}/{item.key}"] = item.tensor
    return tensors


def chunks_to_write(tensors: Mapping[str, Tensor], ranks: ModelRanks) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield names, boxes and data of what this rank writes; over all ranks, every element is written once."""
    for index, (name, tensor) in enumerate(tensors.items()):
        if _writes(tensor, index, ranks):
            local, box = local_part(tensor.detach())
            if local.numel() or not tensor.numel():
                yield name, box, local


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
