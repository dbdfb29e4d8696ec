"""Parameters on several ranks of ``pp``, such as a tied embedding: their gradients are summed after the schedule."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.steps.pipeline.parts import StagedModel

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
    parameters = _shared_parameters(model, staged)
    earlier = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    yield
    unused = _without_gradients(parameters, staged)
    with torch.no_grad():
        for name in staged.shared:
            if name in parameters and name not in unused:
                _sum(name, parameters[name], staged)
        for name, gradient in earlier.items():
            if gradient is not None:
                current = parameters[name].grad
                parameters[name].grad = gradient if current is None else gradient.add_(current)


def _shared_parameters(model: nn.Module, staged: StagedModel) -> dict[str, nn.Parameter]:
    """Return this rank's shared parameters by name: shards, also where FSDP2 has gathered them."""
    entries = ((entry.names[0], entry.tensor) for entry in state_entries(model))
    return {name: p for name, p in entries if name in staged.shared and isinstance(p, nn.Parameter)}


def _without_gradients(parameters: dict[str, nn.Parameter], staged: StagedModel) -> set[str]:
    """Return the parameters that no rank has a gradient of; media may reach parameters that the small copy left out."""
    unused = staged.unused & staged.shared.keys()
    names = {name for name in unused if name in parameters and parameters[name].grad is not None}
    if unused and staged.media:
        by_rank: list[set[str]] = [set()] * staged.mesh.size()
        dist.all_gather_object(by_rank, names, group=staged.mesh.get_group())
        names = set().union(*by_rank)
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
