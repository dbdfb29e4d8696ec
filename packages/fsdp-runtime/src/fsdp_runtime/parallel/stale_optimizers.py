"""A guard against optimizers that hold parameters which a transformation of the model has replaced.

Sharding replaces parameters by DTensors.  An optimizer that was built before still holds the old ones, whose gradients
are never set: its steps change nothing, without an error.

Replaced parameters are marked by an attribute.  Weak references to them would make ``torch.utils.swap_tensors`` fail,
which converts parameters to the master dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_runtime.errors import ModelError

#: The attribute of a replaced parameter: the path that it had in the model.
_MARK = "_fsdp_runtime_replaced"
_hooks: list[Any] = []


@contextmanager
def refuse_stale_optimizers(model: nn.Module) -> Iterator[None]:
    """Make the step of an optimizer raise ``ModelError`` if it holds a parameter that is replaced inside the ``with``.

    Args:
        model: the model whose parameters may be replaced.
    """
    for path, parameter in model.named_parameters():
        setattr(parameter, _MARK, path)
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.__dict__.pop(_MARK, None)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if stale := [parameter.__dict__[_MARK] for parameter in held if _MARK in parameter.__dict__]:
        raise ModelError(
            f"this {type(optimizer).__name__} holds {len(stale)} parameters that parallelize has replaced by shards "
            f"({stale[0]} first), so its step would change nothing: build the optimizer after parallelize, from "
            "model.parameters()"
        )
