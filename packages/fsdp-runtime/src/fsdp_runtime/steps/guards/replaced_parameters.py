"""What users and optimizers have attached to parameters that ``parallelize`` replaces by DTensors.

Attributes and hooks are carried over.  An optimizer that was built before still holds the old parameters, whose
gradients are never set: its steps would change nothing, without an error, so they raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from fsdp_runtime._torch_compat import parameter_hooks, set_parameter_hooks
from fsdp_runtime.errors import ModelError

#: The attribute of a parameter that ``parallelize`` has replaced: its path.  An attribute, since torch refuses to swap
#: tensors that have weak references, and a strong one would keep the memory.
_REPLACED = "_fsdp_runtime_replaced"


@contextmanager
def carry_over_parameters(model: nn.Module) -> Iterator[None]:
    """Carry attributes and hooks over to the parameters that take the place of others inside the ``with``."""
    # Hooks of ``register_post_accumulate_grad_hook`` get the new parameter with its complete gradient, those of
    # ``register_hook`` the gradient as a DTensor; FSDP2, which runs none of the latter, refuses them before.
    attached = {}
    for path, parameter in model.named_parameters():
        attached[path] = dict(vars(parameter)), parameter_hooks(parameter)
        setattr(parameter, _REPLACED, path)
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.__dict__.pop(_REPLACED, None)
    for path, parameter in model.named_parameters():
        attributes, hooks = attached.get(path, ({}, (None, None)))
        vars(parameter).update({**attributes, **vars(parameter)})
        set_parameter_hooks(parameter, hooks)


def refuse_replaced(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse a step of parameters that others have taken the place of."""
    stale = [path for parameter in parameters if (path := getattr(parameter, _REPLACED, None)) is not None]
    if stale:
        raise ModelError(
            f"this {type(optimizer).__name__} holds {len(stale)} parameters that parallelize has replaced by shards "
            f"({stale[0]} first), so its step would change nothing: build the optimizer after parallelize, from "
            "model.parameters()"
        )
