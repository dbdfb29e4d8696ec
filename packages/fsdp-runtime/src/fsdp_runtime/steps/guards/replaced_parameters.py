"""The user's attributes, hooks and optimizers of parameters that DTensors replace.

Attributes and hooks are carried over.  An optimizer built before ``parallelize`` holds the replaced parameters.  They
get no gradients, and a step would change nothing without an error, so the step raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from fsdp_runtime._torch_compat import parameter_hooks, set_parameter_hooks
from fsdp_runtime.errors import ModelError

#: The attribute with a replaced parameter's path.  torch refuses to swap tensors with weak references, and a strong
#: reference would keep the memory.
_REPLACED = "_fsdp_runtime_replaced"


@contextmanager
def carry_over_parameters(model: nn.Module, *, recurse: bool = True) -> Iterator[None]:
    """Carry attributes and hooks over to parameters that are replaced inside the ``with``."""
    # A hook of ``register_post_accumulate_grad_hook`` gets the new parameter with its complete gradient. A hook of
    # ``register_hook`` gets the gradient as a DTensor; FSDP2 does not run it, so it is refused earlier.
    attached = {}
    for path, parameter in model.named_parameters(recurse=recurse):
        attached[path] = dict(vars(parameter)), parameter_hooks(parameter)
        setattr(parameter, _REPLACED, path)
    try:
        yield
    finally:
        for parameter in model.parameters(recurse=recurse):
            parameter.__dict__.pop(_REPLACED, None)
    for path, parameter in model.named_parameters(recurse=recurse):
        attributes, hooks = attached.get(path, ({}, (None, None)))
        vars(parameter).update({**attributes, **vars(parameter)})
        set_parameter_hooks(parameter, hooks)


def refuse_replaced(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse a step of an optimizer with replaced parameters."""
    stale = [path for parameter in parameters if (path := getattr(parameter, _REPLACED, None)) is not None]
    if stale:
        raise ModelError(
            f"this {type(optimizer).__name__} holds {len(stale)} parameters that parallelize has replaced by shards "
            f"({stale[0]} first), so its step would change nothing: build the optimizer after parallelize, from "
            "model.parameters()"
        )
