"""A guard against optimizers that hold parameters which a transformation of the model has replaced.

Sharding replaces parameters by DTensors.  An optimizer that was built before still holds the old ones, whose gradients
are never set: its steps change nothing, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_runtime.errors import ModelError

#: Replaced parameters that something still holds: their paths, by id; entries go with the parameters.
_replaced: dict[int, tuple[str, ref[nn.Parameter]]] = {}
_hooks: list[Any] = []


@contextmanager
def refuse_stale_optimizers(model: nn.Module) -> Iterator[None]:
    """Make the step of an optimizer raise ``ModelError`` if it holds a parameter that is replaced inside the ``with``.

    Args:
        model: the model whose parameters may be replaced.
    """
    before = {id(parameter): (path, ref(parameter)) for path, parameter in model.named_parameters()}
    yield
    kept = {id(parameter) for parameter in model.parameters()}
    for key, (path, parameter) in before.items():
        if key in kept or parameter() is None:
            continue
        _replaced[key] = (path, ref(parameter(), lambda _, key=key: _replaced.pop(key, None)))  # type: ignore[misc,arg-type]
    if _replaced and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _replaced:
        return
    stale = [
        _replaced[id(parameter)][0]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in _replaced and _replaced[id(parameter)][1]() is parameter
    ]
    if stale:
        raise ModelError(
            f"this {type(optimizer).__name__} holds {len(stale)} parameters that parallelize has replaced by shards "
            f"({stale[0]} first), so its step would change nothing: build the optimizer after parallelize, from "
            "model.parameters()"
        )
