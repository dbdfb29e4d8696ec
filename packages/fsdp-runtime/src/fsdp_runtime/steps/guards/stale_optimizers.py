"""A guard against optimizers that hold parameters which a transformation of the model has replaced.

Sharding replaces parameters by DTensors.  An optimizer that was built before still holds the old ones, whose gradients
are never set: its steps change nothing, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_runtime.errors import ModelError

#: The attribute of a parameter that ``parallelize`` has replaced: its path.  An attribute, since torch refuses to swap
#: tensors that have weak references, and a strong one would keep the memory.
_REPLACED = "_fsdp_runtime_replaced"


@contextmanager
def refuse_stale_optimizers(model: nn.Module) -> Iterator[None]:
    """Make the step of an optimizer raise ``ModelError`` if it holds a parameter that is replaced inside the ``with``.

    Args:
        model: the model whose parameters may be replaced.
    """
    for path, parameter in model.named_parameters():
        setattr(parameter, _REPLACED, path)
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.__dict__.pop(_REPLACED, None)
    _register_check()


@cache
def _register_check() -> None:
    """Check the parameters of every optimizer at its steps, once per process."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    stale = [path for parameter in parameters if (path := getattr(parameter, _REPLACED, None)) is not None]
    if stale:
        raise ModelError(
            f"this {type(optimizer).__name__} holds {len(stale)} parameters that parallelize has replaced by shards "
            f"({stale[0]} first), so its step would change nothing: build the optimizer after parallelize, from "
            "model.parameters()"
        )
