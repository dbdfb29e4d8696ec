"""The tensors of a model on the ranks of ``pp``: absent tensors, the state of the whole model, shared parameters.

The state is recorded before a rank loses the tensors of other stages.  Gradients of a parameter on several ranks, such
as a tied embedding, are summed after the schedule.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import own_buffers, own_parameters
from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.state import StateEntry, state_entries
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects
from fsdp_runtime.sharded.model_state import StageRanks
from fsdp_runtime.steps.pipeline.parts import StagedModel


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer of an absent part, and the dict that holds it."""

    module: nn.Module
    tensors: dict[str, Any]
    name: str
    tensor: Tensor

    def put(self, tensor: Tensor | None) -> None:
        """Put the tensor, or ``None``, in its place."""
        self.tensors[self.name] = tensor
        if (part := runtime_state(self.module).part) is not None:
            (part.removed.add if tensor is None else part.removed.discard)(self.name)


def absent_tensors(model: nn.Module, staged: StagedModel, rank: int) -> list[Slot]:
    """Return the parameters and buffers that a rank of ``pp`` does not need; tied parameters stay where one does."""
    stages = staged.stages_of(rank)
    kept = {path for stage in stages for path in staged.blocks[slice(*staged.ranges[stage])]}
    ends = {"every", *(["first"] if 0 in stages else []), *(["last"] if len(staged.ranks) - 1 in stages else [])}
    kept |= {path for path, where in staged.outer.items() if where in ends}
    absent = [path for path in (*staged.blocks, *staged.outer) if path not in kept]
    others = {module for path in absent for module in model.get_submodule(path).modules()}
    used = {id(slot.tensor) for module in model.modules() if module not in others for slot in _own(module)}
    return [slot for module in others for slot in _own(module) if id(slot.tensor) not in used]


def _own(module: nn.Module) -> Iterator[Slot]:
    for tensors in (own_parameters(module), own_buffers(module)):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield Slot(module, tensors, name, tensor)


@contextmanager
def without(slots: Sequence[Slot]) -> Iterator[None]:
    """Remove tensors from their modules inside the ``with``."""
    for slot in slots:
        slot.put(None)
    try:
        yield
    finally:
        for slot in slots:
            slot.put(slot.tensor)


def holders_of(model: nn.Module, staged: StagedModel, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of ``pp`` that hold each tensor, by its name."""
    holders: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(set(staged.ranks)):
        absent = {id(slot.tensor) for slot in absent_tensors(model, staged, rank)}
        for name, tensor in tensors.items():
            holders[name] += [] if id(tensor) in absent else [rank]
    return {name: tuple(ranks) for name, ranks in holders.items()}


def recorded_state(model: nn.Module, staged: StagedModel, mesh: DeviceMesh) -> tuple[StateEntry, ...]:
    """Return the state entries of the whole model with empty tensors, and the ranks with each tensor."""
    table, entries = StageRanks(mesh).table, []
    state = {entry.names[0]: entry for entry in state_entries(model)}
    holders = holders_of(model, staged, {name: entry.tensor for name, entry in state.items()})
    for name, entry in state.items():
        empty = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device="meta")
        if isinstance(entry.tensor, nn.Parameter):
            empty = nn.Parameter(empty, entry.tensor.requires_grad)
        ranks = tuple(sorted(rank for holder in holders[name] for rank in table[holder]))
        entries.append(replace(entry, tensor=empty, ranks=ranks, is_absent=staged.rank not in holders[name]))
    return tuple(entries)


#: The attribute that ``rl_logprobs`` reads for norms over all stages.
STAGES = "_pipeline_stages"


def mark_stage_parameters(model: nn.Module) -> None:
    """Record on each parameter the group, device and dtype of norms over all stages, and whether the rank counts it."""
    staged: StagedModel | None = runtime_state(model).stages
    if staged is None:
        return
    trained = [entry.tensor.dtype for entry in staged.state if entry.tensor.requires_grad]
    dtype = torch.float64 if torch.float64 in trained else torch.float32
    norm = torch.device(staged.mesh.device_type), dtype
    # torch has one value per process here: the norm of a stage without trained parameters needs the group as well, and
    # must not keep it alive.
    setattr(dist.group, STAGES, (weakref.ref(staged.mesh.get_group()), False, *norm))
    for name, parameter in model.named_parameters():
        counted = staged.shared.get(name, (staged.rank,))[0] == staged.rank
        setattr(parameter, STAGES, (staged.mesh.get_group(), counted, *norm))


@contextmanager
def summing_shared_gradients(model: nn.Module, staged: StagedModel) -> Iterator[None]:
    """Sum the gradients that a schedule computes inside the ``with``; earlier ones are sums already."""
    entries = ((entry.names[0], entry.tensor) for entry in state_entries(model))  # shards, also of gathered parameters
    parameters = {name: p for name, p in entries if name in staged.shared and isinstance(p, nn.Parameter)}
    earlier = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        yield
        unused = _without_gradients(parameters, staged)
        with torch.no_grad():
            for name in staged.shared:
                if name in parameters and name not in unused:
                    _sum(name, parameters[name], staged)
    except BaseException:
        for name, parameter in parameters.items():
            parameter.grad = earlier[name]
        raise
    for name, gradient in earlier.items():
        if gradient is not None:
            current = parameters[name].grad
            with torch.no_grad():
                parameters[name].grad = gradient if current is None else gradient.add_(current)


def _without_gradients(parameters: dict[str, nn.Parameter], staged: StagedModel) -> set[str]:
    """Return the parameters that no rank has a gradient of; media may reach parameters that the small copy left out."""
    unused = staged.unused & staged.shared.keys()
    names = {name for name in unused if name in parameters and parameters[name].grad is not None}
    if unused and staged.media:
        names = set().union(*all_gather_objects(ModelRanks((staged.mesh.get_group(),)), names).values())
    elif names:
        raise ModelError(f"{min(names)} got a gradient, and none in the small copy of the model: report this model")
    return {*unused - names}


def _sum(name: str, parameter: nn.Parameter, staged: StagedModel) -> None:
    """Exchange a gradient with the other ranks of the parameter, and add in the order of ranks: equal bits on all."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    group, ranks = staged.mesh.get_group(), staged.shared[name]
    own = local.contiguous()
    parts: dict[int, Tensor] = {rank: own if rank == staged.rank else torch.empty_like(own) for rank in ranks}
    operations = []
    for rank in ranks:
        if rank != staged.rank:
            peer = dist.get_global_rank(group, rank)
            operations.append(dist.P2POp(dist.isend, own, peer, group))
            operations.append(dist.P2POp(dist.irecv, parts[rank], peer, group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    total = parts[ranks[0]].clone()
    for rank in ranks[1:]:
        total += parts[rank]
    local.copy_(total)
