"""Gradient accumulation: gradients of several micro-batches with the communication of one."""

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
    """Accumulate gradients on this rank inside the ``with``; the first backward after it reduces their sum.

    Run the backward of every micro-batch except the last inside the ``with``.  Gradients are summed: with ``n``
    micro-batches, divide each loss by ``n`` for the gradient of their mean.  Collectives of tensor parallelism belong
    to each layer's backward and are not deferred.

    Args:
        model: a model that FSDP2 wraps; a plain one does not change.
        reduce_scatter: with ``dp_replicate``, still reduce-scatter gradients to the shards in every backward and skip
            only the all-reduce between replicas: more communication, and gradients take the memory of shards.
        reshard_after_backward: ``False`` keeps parameters gathered, so that the next micro-batch does not gather
            them: least communication, most memory.

    Yields:
        The same model.  Inside an outer ``no_sync`` of the model nothing changes.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime import no_sync
        >>> model = nn.Linear(4, 1)
        >>> batches = torch.ones(3, 2, 4)
        >>> for index, batch in enumerate(batches):
        ...     if index < len(batches) - 1:
        ...         with no_sync(model):
        ...             (model(batch).mean() / len(batches)).backward()
        ...     else:
        ...         (model(batch).mean() / len(batches)).backward()
        >>> model.weight.grad
        tensor([[1., 1., 1., 1.]])
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
