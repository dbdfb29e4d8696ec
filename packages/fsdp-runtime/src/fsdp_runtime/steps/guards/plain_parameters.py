"""Plain parameters that an optimizer holds next to shards, such as those of a head around a parallelized model.

No rank reduces their gradients but the user, so those of a data parallel rank may be of its own batch.  Each rank would
then step to other values, without an error.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_runtime.errors import ModelError

#: Optimizers whose plain parameters have had equal gradients, other than 0, on every rank.
_compared: WeakSet[Optimizer] = WeakSet()

#: The relative difference of sums of gradients that reductions in another order explain, in float32 and narrower.
_TOLERANCE = 1e-3


@cache
def compare_plain_gradients() -> None:
    """Compare the gradients of plain parameters over the ranks, at the first step of every optimizer that has some."""
    register_optimizer_step_pre_hook(_compare)


@torch.no_grad()
def _compare(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _compared:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    plain = [each for each in parameters if each.requires_grad and not isinstance(each, DTensor)]
    meshes = dict.fromkeys(each.device_mesh for each in parameters if plain and isinstance(each, DTensor))
    groups = {axis: mesh.get_group(axis) for mesh in meshes for axis in mesh.mesh_dim_names or ()}
    groups = {a: g for a, g in groups.items() if dist.get_world_size(g) > 1 and dist.get_backend(g) != "fake"}
    if not groups:
        return
    device = next(iter(meshes)).device_type
    sums = torch.stack([_sum(parameter, device) for parameter in plain])
    bounds = torch.cat([sums, -sums])
    for group in groups.values():
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least = bounds.chunk(2)
    if different := (most + least > _TOLERANCE * most).nonzero().flatten().tolist():
        raise ModelError(
            f"{len(different)} of {len(plain)} parameters of this {type(optimizer).__name__} that are no shards (first "
            f"of shape {tuple(plain[different[0]].shape)}) have other gradients on other ranks of {', '.join(groups)}, "
            "as nothing reduces them: put their module into the model before parallelize, or average their gradients "
            "over the ranks before the step"
        )
    if bool(sums.any()):
        _compared.add(optimizer)


def _sum(parameter: torch.Tensor, device: str) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    return gradient.double().abs().sum().to(device)
