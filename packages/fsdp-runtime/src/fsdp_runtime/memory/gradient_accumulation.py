"""Gradients over several micro-batches, with the communication of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime.runtime_state import reshards_after_forward, runtime_state


@contextmanager
def no_sync(
    model: nn.Module, *, reduce_scatter: bool = False, reshard_after_backward: bool = True
) -> Iterator[nn.Module]:
    """Add up gradients on this rank inside the ``with``; the first backward after it reduces the sum.

    So every micro-batch but the last runs its backward inside, and the last one outside.  Gradients are summed: with
    ``n`` micro-batches, divide each loss by ``n`` for the gradient of their mean.  What layers split over ``tp``
    exchange is part of their own backward and stays.

    Args:
        model: a model that FSDP2 wraps; a plain one is left alone.
        reduce_scatter: with ``dp_replicate``, still scatter gradients to the shards each time, and leave out
            only the all-reduce between replicas: more communication, and gradients take the room of shards.
        reshard_after_backward: ``False`` keeps parameters gathered, so that the next micro-batch need not gather
            them: least communication, most memory.

    Yields:
        The same model.  Nested use leaves the outer one in force.
    """
    units = [
        (module, reshards_after_forward(module, is_root=module is model))
        for module in model.modules()
        if isinstance(module, FSDPModule) and not runtime_state(module).no_sync
    ]

    def sync(on: bool) -> None:
        for unit, reshards in units:
            if reduce_scatter:
                unit.set_requires_all_reduce(on, recurse=False)
            else:
                unit.set_requires_gradient_sync(on, recurse=False)
            if not reshard_after_backward:
                unit.set_reshard_after_backward(on, recurse=False)
                unit.set_reshard_after_forward(on and reshards, recurse=False)

    for unit, _ in units:
        runtime_state(unit).no_sync = True
    try:
        sync(False)
        yield model
    finally:
        sync(True)
        for unit, _ in units:
            runtime_state(unit).no_sync = False
