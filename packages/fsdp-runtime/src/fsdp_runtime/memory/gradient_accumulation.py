"""Gradient accumulation: one reduction for the gradients of several micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime import _torch_compat as fsdp2
from fsdp_runtime.errors import ModelError
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
        model: a model that FSDP2 wraps; a plain model does not change.
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


def watch_accumulation(root: Any, outputs: Iterable[Tensor]) -> None:
    """When a backward from a root's outputs begins, drop accumulated gradients that the user has cleared."""
    # FSDP2 keeps accumulated gradients away from ``parameter.grad``, so neither ``zero_grad`` nor ``grad = None``
    # reaches them. Between two backwards ``parameter.grad`` is a placeholder of zeros; if cleared, it is gone.

    def begin(_gradient: Tensor) -> None:
        drop_cleared_gradients(root)
        drop_placeholders(root)
        fsdp2.after_backward(partial(_mark, root))

    for output in outputs:
        if output.requires_grad:
            output.register_hook(begin)  # type: ignore[no-untyped-call]


def drop_placeholders(root: Any) -> None:
    """Take the placeholders from ``parameter.grad``; the next reduction writes there."""
    state = runtime_state(root)
    for shard, mark in state.marks:
        shard.grad = None if shard.grad is mark else shard.grad
    state.marks = ()


def _mark(root: Any) -> None:
    state = runtime_state(root)
    if state.marks or not fsdp2.accumulates(root):  # another output of the same backward has set the marks
        return
    shards = [shard for unit in state.units for shard in fsdp2.unreduced_gradients(unit)]
    state.marks = [(shard, fsdp2.placeholder(shard) if shard.grad is None else None) for shard in shards]
    for shard, mark in state.marks:
        shard.grad = shard.grad if mark is None else mark


def drop_cleared_gradients(root: Any) -> None:
    """Drop a parameter's accumulated gradients if the user has set ``grad`` to ``None`` or zero."""
    state = runtime_state(root)
    zeroed = {
        shard for shard, mark in state.marks if mark is not None and shard.grad is mark and fsdp2.tensor_version(mark)
    }
    cleared = zeroed | {shard for shard, _ in state.marks if shard.grad is None}
    if cleared and not all(fsdp2.drop_unreduced_gradients(unit, cleared) for unit in state.units):
        raise ModelError(
            f"the gradients of {len(cleared)} parameters were cleared, and no_sync(reduce_scatter=True) keeps them "
            "in one buffer with other gradients: call model.zero_grad()"
        )
    for shard in zeroed:
        shard.grad = torch.zeros_like(shard)
    state.marks = [(shard, mark) for shard, mark in state.marks if shard not in cleared]
