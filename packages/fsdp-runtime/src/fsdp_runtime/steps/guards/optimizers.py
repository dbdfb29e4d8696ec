"""Steps of optimizers with a model's shards or with parameters around the model.

- An optimizer built before ``parallelize`` holds replaced parameters; its step raises.
- FSDP2 does not reduce the gradients of plain parameters, such as a head around a model.  If their gradients or values
  differ between ranks, the first steps raise.
- A plain parameter in an operation with a DTensor, such as a learned temperature of logits, gets a partial sum as its
  gradient.  The hook replaces it by the sum before a step.
- A fused or ``foreach`` step passes a parameter group to torch in one call.  torch refuses DTensors of several meshes
  in it, or DTensors beside plain tensors.  During a step each group is divided by mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_runtime.errors import ModelError
from fsdp_runtime.steps.guards.replaced_parameters import refuse_replaced

#: The number of plain parameters of an optimizer that had equal, nonzero gradients on every rank.
_compared: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
#: Parallelized models.
_models: WeakSet[nn.Module] = WeakSet()
#: Reductions in another order change a tensor by less than this, relative to its largest element.
_TOLERANCE = 1e-3
#: The attribute of an optimizer with its undivided groups during a step.
_GROUPS = "_fsdp_runtime_groups"


def watch_optimizers(model: nn.Module) -> None:
    """Check the steps of every optimizer, and divide its groups by mesh."""
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
    shards = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    plain = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    refuse_replaced(optimizer, parameters)
    if on_meta := sum(parameter.is_meta for parameter in shards):
        raise ModelError(
            f"{on_meta} of the {len(parameters)} parameters of this {type(optimizer).__name__} are on the meta device, "
            "so its step would change nothing: call load_weights(model, checkpoint), or materialize(model) and "
            "set initial values"
        )
    for parameter in plain:
        if isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.full_tensor()
    if plain and _compared.get(optimizer) != len(plain):
        _compare(optimizer, plain, shards or _shards_beside(plain))
    # Optimizers of other packages may write to their groups, as schedule-free optimizers do; a division loses this.
    if type(optimizer).__module__.startswith("torch.optim."):
        groups = optimizer.param_groups
        parts = [part for group in groups for part in _parts(group)]
        if len(parts) > len(groups):
            optimizer.__dict__[_GROUPS], optimizer.param_groups = groups, parts


def _shards_beside(plain: Sequence[Tensor]) -> list[DTensor]:
    """Return the shards of the parallelized models that contain one of the plain parameters."""
    models = models_with(plain)
    return [parameter for model in models for parameter in model.parameters() if isinstance(parameter, DTensor)]


def models_with(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the parallelized models that contain one of the parameters."""
    ids = {*map(id, parameters)}
    return [model for model in _models if any(id(parameter) in ids for parameter in model.parameters())]


def _compare(optimizer: Optimizer, plain: Sequence[Tensor], shards: Sequence[DTensor]) -> None:
    """Compare plain parameters and their gradients over the ranks, until a step has nonzero gradients."""
    meshes = dict.fromkeys(shard.device_mesh for shard in shards)
    groups = {axis: mesh.get_group(axis) for mesh in meshes for axis in mesh.mesh_dim_names or ()}
    groups = {a: g for a, g in groups.items() if dist.get_world_size(g) > 1 and dist.get_backend(g) != "fake"}
    trained = [parameter for parameter in plain if parameter.requires_grad]
    if not groups or not trained:
        return
    device = next(iter(meshes)).device_type
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    for name, tensors, cause, fix in (
        ("values", trained, "drawn per rank", "draw it after the same seed on every rank, as torch.manual_seed(0)"),
        ("gradients", gradients, "as they are not reduced", "average their gradients over the ranks before the step"),
    ):
        if different := [tensor for tensor in tensors if _differs(tensor, groups, device)]:
            raise ModelError(
                f"{len(different)} of {len(trained)} plain parameters of this {type(optimizer).__name__} "
                f"(first of shape {tuple(different[0].shape)}) have different {name} on the ranks of "
                f"{', '.join(groups)}, {cause}: put their module into the model before parallelize, or {fix}"
            )
    if any(bool(gradient.any()) for gradient in gradients):
        _compared[optimizer] = len(plain)


def _differs(tensor: Tensor, groups: Mapping[str, ProcessGroup], device: str) -> bool:
    """Return whether a tensor differs between ranks by more than the rounding of a reduction.  Collective."""
    values = tensor.detach().to(device, torch.float32)
    bounds = torch.stack([values, -values])
    for group in groups.values():
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    tolerance = max(_TOLERANCE, 4 * torch.finfo(tensor.dtype).eps)
    return bool(bounds.sum(0).max() > tolerance * bounds.abs().max())


def _restore(optimizer: Optimizer, *_: Any) -> None:
    if (groups := optimizer.__dict__.pop(_GROUPS, None)) is not None:
        optimizer.param_groups = groups


def _parts(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a group, or its parts by mesh if one call would take all its tensors."""
    by_mesh: dict[Any, list[Any]] = {}
    if group.get("fused") or group.get("foreach"):
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(by_mesh) < 2:
        yield group
    else:
        yield from ({**group, "params": parameters} for parameters in by_mesh.values())
