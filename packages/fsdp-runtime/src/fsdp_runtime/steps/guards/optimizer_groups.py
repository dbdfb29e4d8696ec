"""Steps of optimizers that hold plain tensors next to DTensors, or DTensors of several meshes.

One call of a fused or ``foreach`` step takes the tensors of a parameter group together, and torch refuses lists of
several kinds.  During a step each group is divided by mesh; its state and its settings stay those of the group.  Only
torch's own optimizers are served: others may write to the group that they step, as schedule-free ones do, and that
would be lost.

A plain parameter of the user's own that has met a DTensor, as a learned temperature the logits, has a DTensor as its
gradient, a partial sum: a step gets the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

#: The attribute of an optimizer that holds its own groups during a step.
_GROUPS = "_fsdp_runtime_groups"


@cache
def step_meshes_apart() -> None:
    """Divide the groups of every optimizer during its steps, once per process."""
    register_optimizer_step_pre_hook(_divide)
    register_optimizer_step_post_hook(_restore)


def _divide(optimizer: Optimizer, *_: Any) -> None:
    _restore(optimizer)  # after a step that raised
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if isinstance(parameter.grad, DTensor) and not isinstance(parameter, DTensor):
            parameter.grad = parameter.grad.full_tensor()
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
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
