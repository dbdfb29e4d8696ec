"""Backward nodes, their saved tensors, and the groups of a split backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from fsdp_runtime._torch_compat.meshes import local_tensor


def check_saved_tensors(freed: Callable[[], Exception]) -> AbstractContextManager[None]:
    """Raise ``freed()`` if backward reads a tensor saved inside the ``with`` that has lost its storage."""
    # torch's error names only the storage. For tensors with hooks torch does not check for in-place changes (since
    # pytorch/pytorch#60975), so this function checks them.

    def unpack(saved: tuple[Tensor, int]) -> Tensor:
        local = local_tensor(saved[0])
        if local.numel() and local.device.type != "meta" and local.untyped_storage().nbytes() == 0:
            raise freed()
        return unchanged(saved)

    return torch.autograd.graph.saved_tensors_hooks(with_version, unpack)


def with_version(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a saved tensor and its version, for :func:`unchanged`; with hooks, torch does not compare versions."""
    # A record that holds the tensor's own graph would keep the graph alive after its last backward.
    return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version


def unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor; raise torch's error if an operator has changed it since it had the version."""
    tensor, version = saved
    require_version(tensor, tensor._version, version)
    return tensor


def require_version(tensor: Tensor, version: int, expected: int) -> None:
    """Raise torch's error of a saved tensor that was changed in place, if its versions differ."""
    if version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {version}, expected "
            f"version {expected}"
        )


def tensor_version(tensor: Tensor) -> int:
    """Return a tensor's version, which grows from 0 with each in-place operator."""
    return tensor._version


def autograd_position() -> int:
    """The number that the next operator's backward node will get in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def running_backward_of() -> int | None:
    """The number of the backward node that runs now; ``None`` outside backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def in_backward() -> bool:
    """Return True while a backward runs in this thread, its hooks and callbacks included."""
    return int(torch._C._current_graph_task_id()) != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the running backward, as DDP and FSDP2 do."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def viewed_tensor(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view shares memory with, ``None`` for a tensor that is not a view."""
    return getattr(tensor, "_base", None)


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the hooks that pack and unpack saved tensors now; torch runs the innermost pair only."""
    # ``torch.utils.checkpoint`` and activation offload are such hooks.
    return cast("tuple[Any, Any] | None", torch._C._autograd._top_saved_tensors_default_hooks(False))


def merged_parameter_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one group of the parameters, and of the nodes from which a split backward continues to them."""
    # torch puts a parameter between several nodes into several groups, and runs a backward for each group:
    # its gradient is then counted twice, or raises because the graph is freed. ``get_param_groups`` in
    # torch/distributed/pipelining/_backward.py joins a parameter's groups one by one. One backward over all nodes
    # counts each gradient once.
    gradients: dict[Any, Any] = {}
    for group in groups:
        reached = zip(group["intermediates"], group.get("grads") or (), strict=False)
        gradients.update((node, values) for node, values in reached if values is not None)
    parameters = dict.fromkeys(p for group in groups if any(group.get("grads") or ()) for p in group["params"])
    return [{"params": parameters, "intermediates": [*gradients], "grads": [*gradients.values()]}] if gradients else []
