"""What a rank contributes to a training state: the tensors by name, and which of their boxes it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.state import entries
from fsdp_runtime.sharded.chunks import Box, own_part
from fsdp_runtime.sharded.collectives import Ranks
from fsdp_runtime.sharded.shard_offsets import cuts
from fsdp_runtime.training_state.optimizers import parameter_names, state_tensors


@dataclass(frozen=True)
class Named:
    """A tensor of the training state under the name that it has in the manifest."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Own:
    """A box of a tensor that this rank writes, and this rank's plain tensor with its elements."""

    name: str
    box: Box
    local: Tensor


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """One optimizer, several or none, as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def named_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Named]:
    """Every tensor of the model and of the optimizers' state, in an order that all ranks share.

    Raises:
        OptionError: the model is on the meta device, or a tensor of an optimizer's state cannot be saved.
    """
    found = entries(model)
    if on_meta := [entry.names[0] for entry in found if entry.tensor.is_meta]:
        raise OptionError(f"{len(on_meta)} tensors are on the meta device, first {on_meta[0]}: load weights first")
    names = parameter_names(found, optimizers)
    return [
        *(Named(f"model/{entry.names[0]}", entry.tensor) for entry in found),
        *(
            Named(f"optimizer/{number}/{item.parameter}/{item.key}", item.tensor)
            for number, optimizer in enumerate(optimizers)
            for item in state_tensors(optimizer, names)
        ),
    ]


def own_boxes(tensors: Sequence[Named], ranks: Ranks) -> Iterator[Own]:
    """What this rank writes, so that all together write every element once.

    Args:
        tensors: the same on every rank.
        ranks: the ranks of the model.
    """
    for number, named in enumerate(tensors):
        tensor = named.tensor.detach()
        if _writes(tensor, number, ranks):
            local, box = own_part(tensor)
            if local.numel() or not tensor.numel():
                yield Own(named.name, box, local)


def _writes(tensor: Tensor, number: int, ranks: Ranks) -> bool:
    """Copies are dealt out, so that the ranks have about the same to write."""
    if not isinstance(tensor, DTensor):
        return number % ranks.count == ranks.index
    mesh = tensor.device_mesh
    if ranks.first not in mesh.mesh:  # another part of the model's mesh holds all of it too
        return False
    cut_axes = {cut.axis for cut in cuts(tensor.placements, mesh.shape)}
    copy, copies = 0, 1
    for axis, coordinate in enumerate(mesh.get_coordinate() or ()):
        if axis not in cut_axes:
            copy = copy * mesh.shape[axis] + coordinate
            copies *= mesh.shape[axis]
    return number % copies == copy
