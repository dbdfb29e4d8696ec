"""Backward nodes and their saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime._torch_compat.meshes import local_tensor


@contextmanager
def check_saved_tensors(freed: Callable[[], Exception]) -> Iterator[None]:
    """Raise ``freed()`` if backward reads a tensor saved inside the ``with`` that has lost its storage."""
    # torch's error names only the storage. For tensors with hooks torch does not check for in-place changes (2.11 to
    # 2.15, since pytorch/pytorch#60975), so this function checks them; the version of a tensor is not public.

    def unpack(saved: tuple[Tensor, int]) -> Tensor:
        local = local_tensor(saved[0])
        if local.numel() and local.device.type != "meta" and local.untyped_storage().nbytes() == 0:
            raise freed()
        return unchanged(saved)

    with torch.autograd.graph.saved_tensors_hooks(with_version, unpack):
        yield


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
    """Return a tensor's version, which grows with each in-place operator (private in torch 2.11 to 2.15)."""
    return tensor._version


def autograd_position() -> int:
    """The number that the next operator's backward node will get in this thread (private in torch 2.11 to 2.15)."""
    return int(torch._C._autograd._get_sequence_nr())


def running_backward_of() -> int | None:
    """The number of the backward node that runs now; ``None`` outside backward (private in torch 2.11 to 2.15)."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def in_backward() -> bool:
    """Return True while a backward runs in this thread, its hooks and callbacks included (private in 2.11 to 2.15)."""
    return int(torch._C._current_graph_task_id()) != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the running backward, as DDP and FSDP2 do (private in torch 2.11 to 2.15)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_written(tensor: Tensor) -> bool:
    """Return whether an operator has changed a tensor in place (``Tensor._version``, private in torch 2.11 to 2.15)."""
    return tensor._version > 0


def viewed_tensor(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view shares memory with, ``None`` for a tensor that is not a view."""
    # ``Tensor._base`` of torch 2.11 to 2.15; a public name does not exist.
    return getattr(tensor, "_base", None)


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the hooks that pack and unpack saved tensors now; torch runs the innermost pair only."""
    # ``torch.utils.checkpoint`` and activation offload are such hooks; torch 2.11 to 2.15 have no public getter.
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks
