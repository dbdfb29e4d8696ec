"""Steps of optimizers that hold parameters of a parallelized model: refused where a step would be wrong, or divided.

- Some optimizers cannot step shards: torch would raise in the middle of a step, after it has changed some of them.
- An optimizer from before ``parallelize`` holds parameters whose gradients are never set.
- No rank reduces the gradients of plain parameters next to shards, such as those of a head around a model, but the
  user; where they are of a rank's own batch, each rank would step to other values, without an error.
- Such parameters, drawn after another seed on each rank, would stay different.
- A plain parameter that has met a DTensor, as a learned temperature the logits, has a DTensor as its gradient, a
  partial sum: a step gets the sum.
- One call of a fused or ``foreach`` step takes the tensors of a group together, and torch refuses lists of plain
  tensors and DTensors, or of DTensors of several meshes: during a step each group is divided by mesh.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime.errors import ModelError
from fsdp_runtime.sharded.initial_values import differ
from fsdp_runtime.steps.guards.replaced_parameters import refuse_replaced

#: What optimizers of torch and transformers do, by the names of their classes, that DTensors cannot.
_CANNOT = {
    "Rprop": "writes to the elements whose gradients change their sign",
    "Adafactor": "updates means of rows and columns in place",
    "LBFGS": "makes one vector of all parameters, which takes DTensors alone, of parts of equal size",
}
#: Optimizers of torch whose fused step has no sharding strategy for DTensors in torch 2.10 to 2.14.
_CANNOT_FUSED = ("Adagrad", "SGD")
#: Optimizers, with the number of their plain parameters that have had equal gradients, other than 0, on every rank.
_compared: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
#: Models that were parallelized.
_models: WeakSet[nn.Module] = WeakSet()
#: The relative difference of sums of gradients that reductions in another order explain, in float32 and narrower.
_TOLERANCE = 1e-3
#: The attribute of an optimizer that holds its own groups during a step.
_GROUPS = "_fsdp_runtime_groups"


def watch_optimizers(model: nn.Module) -> None:
    """Check and divide the steps of every optimizer, of a parallelized model's parameters or others."""
    _models.add(model)
    _watch()


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_restore)


@torch.no_grad()
def _before(optimizer: Optimizer, *_: Any) -> None:
    _restore(optimizer)  # after a step that raised
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards = [each for each in parameters if isinstance(each, DTensor)]
    plain = [each for each in parameters if not isinstance(each, DTensor)]
    refuse_replaced(optimizer, parameters)
    if on_meta := sum(each.is_meta for each in shards):
        raise ModelError(
            f"{on_meta} of the {len(parameters)} parameters of this {type(optimizer).__name__} are on the meta device, "
            "so its step would change nothing: call load_weights(model, checkpoint), or materialize(model) and set "
            "initial values of your own"
        )
    _refuse_kind(optimizer, shards, len(parameters))
    _refuse_fused(optimizer)
    for parameter in plain:
        if isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.full_tensor()
    if plain and _compared.get(optimizer) != len(plain):
        _compare(optimizer, [each for each in plain if each.requires_grad], shards or _shards_beside(plain))
    # Only torch's own optimizers are divided: others may write to the group that they step, as schedule-free ones do,
    # and that would be lost.
    if type(optimizer).__module__.startswith("torch.optim."):
        _divide(optimizer)


def _refuse_kind(optimizer: Optimizer, shards: Sequence[DTensor], total: int) -> None:
    if (kind := _kind_among(_CANNOT, optimizer)) is None:
        return
    one_vector = kind.__name__ == "LBFGS" and len(shards) == total and all(map(_is_even, shards))
    if shards and not one_vector:
        raise ModelError(
            f"{kind.__name__} {_CANNOT[kind.__name__]}, and {len(shards)} of its {total} parameters are "
            "shards: take an optimizer that steps each element alone, as AdamW does"
        )


def _refuse_fused(optimizer: Optimizer) -> None:
    if (kind := _kind_among(_CANNOT_FUSED, optimizer)) is None:
        return
    for number, group in enumerate(optimizer.param_groups):
        shards = [each for each in group["params"] if isinstance(each, DTensor)]
        if shards and group.get("fused"):
            raise ModelError(
                f"torch's fused step of {kind.__name__} takes no DTensors, and {len(shards)} of the "
                f"{len(group['params'])} parameters of group {number} are: pass fused=False, foreach=True"
            )


def _kind_among(names: Container[str], optimizer: Optimizer) -> type | None:
    """Return the class of torch or transformers with one of the names that an optimizer is, or is derived from."""
    kind = next((each for each in type(optimizer).__mro__ if each.__name__ in names), None)
    known = kind is not None and kind.__module__.partition(".")[0] in ("torch", "transformers")
    return kind if known else None


def _is_even(shard: DTensor) -> bool:
    axes = range(shard.device_mesh.ndim)
    ranks = prod(shard.device_mesh.size(axis) for axis in axes if not shard.placements[axis].is_replicate())
    return local_tensor(shard).numel() * ranks == shard.numel()


def _compare(optimizer: Optimizer, plain: Sequence[torch.Tensor], shards: Sequence[DTensor]) -> None:
    """Compare plain parameters and their gradients over the ranks, until a step has gradients other than 0."""
    meshes = dict.fromkeys(each.device_mesh for each in shards if plain)
    groups = {axis: mesh.get_group(axis) for mesh in meshes for axis in mesh.mesh_dim_names or ()}
    groups = {a: g for a, g in groups.items() if dist.get_world_size(g) > 1 and dist.get_backend(g) != "fake"}
    if not groups:
        return
    device = next(iter(meshes)).device_type
    _compare_values(optimizer, plain, groups, device)
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
        _compared[optimizer] = sum(
            not isinstance(each, DTensor) for g in optimizer.param_groups for each in g["params"]
        )


def _compare_values(
    optimizer: Optimizer, plain: Sequence[torch.Tensor], groups: Mapping[str, ProcessGroup], device: str
) -> None:
    tensors = {str(index): parameter.detach() for index, parameter in enumerate(plain)}
    unequal = [each for each, differs in zip(plain, differ(tensors, [*groups.values()]), strict=True) if differs]
    if far := [each for each in unequal if _is_far(each, groups, device)]:
        raise ModelError(
            f"{len(far)} of {len(plain)} parameters of this {type(optimizer).__name__} that are no shards (first of "
            f"shape {tuple(far[0].shape)}) have other values on other ranks of {', '.join(groups)}: put their module "
            "into the model before parallelize, or draw it after the same seed on every rank, as torch.manual_seed(0)"
        )


def _is_far(parameter: torch.Tensor, groups: Mapping[str, ProcessGroup], device: str) -> bool:
    """Return whether values of the ranks differ by more than reductions in another order explain.  Collective."""
    values = parameter.detach().to(device, torch.float32)
    bounds = torch.stack([values, -values])
    for group in groups.values():
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    tolerance = max(_TOLERANCE, 4 * torch.finfo(parameter.dtype).eps)
    return bool(bounds.sum(0).max() > tolerance * bounds.abs().max())


def _shards_beside(plain: Sequence[torch.Tensor]) -> list[DTensor]:
    """Return the shards of the parallelized models that have one of the parameters."""
    ids = {*map(id, plain)}
    models = [model for model in _models if any(id(parameter) in ids for parameter in model.parameters())]
    return [each for model in models for each in model.parameters() if isinstance(each, DTensor)]


def _sum(parameter: torch.Tensor, device: str) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    return gradient.double().abs().sum().to(device)


def _divide(optimizer: Optimizer) -> None:
    groups = optimizer.param_groups
    parts = [part for group in groups for part in _parts(group)]
    if len(parts) > len(groups):
        optimizer.__dict__[_GROUPS] = groups
        optimizer.param_groups = parts


def _restore(optimizer: Optimizer, *_: Any) -> None:
    if (groups := optimizer.__dict__.pop(_GROUPS, None)) is not None:
        optimizer.param_groups = groups


def _parts(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the group, or its parts by mesh where one call would take all of its tensors."""
    by_mesh: dict[Any, list[Any]] = {}
    if group.get("fused") or group.get("foreach"):
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(by_mesh) < 2:
        yield group
    else:
        yield from ({**group, "params": parameters} for parameters in by_mesh.values())
