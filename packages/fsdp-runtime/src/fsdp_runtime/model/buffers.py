"""Compute the buffers that no checkpoint stores (rotary frequencies, embedding scales) of a meta-device model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from fsdp_runtime._torch_compat import persistent_buffers
from fsdp_runtime._transformers_compat.initialization import initialize_module
from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.errors import MetaBufferError

logger = logging.getLogger(__name__)


@contextmanager
def meta_device() -> Iterator[None]:
    """Build a model with parameters on the meta device and buffers on a real device.

    Under ``torch.device("meta")`` non-persistent buffers have to be computed again; under this context manager the
    constructor computes them.  Parameters are allocated one at a time and freed as soon as they are registered; a
    tensor of 2**28 elements or more, such as a stack of experts, is never allocated.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import meta_device
        >>> with meta_device():
        ...     norm = nn.BatchNorm1d(4)
        >>> norm.weight.device.type, norm.running_mean.device.type
        ('meta', 'cpu')
    """

    def to_meta(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    with register_module_parameter_registration_hook(to_meta), _LargeOnMeta():  # type: ignore[arg-type]
        yield


#: Functions that make a tensor of a given size.
_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
#: Elements of a tensor too large for a buffer: filling it may take seconds, or more memory than the host has.
_LARGE = 2**28


class _LargeOnMeta(TorchFunctionMode):
    """Make large tensors on the meta device if the caller names no device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") is None:
            on_meta = func(*args, **{**kwargs, "device": "meta"})
            if on_meta.numel() >= _LARGE:
                return on_meta
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _BufferOwner:
    """A module with non-persistent buffers on the meta device, and the ``PreTrainedModel`` that contains it."""

    path: str
    module: nn.Module
    buffers: dict[str, Tensor]
    pretrained: Any


def compute_meta_buffers(model: nn.Module) -> None:
    """Compute every non-persistent buffer that is on the meta device, on the CPU."""
    # A buffer is computed twice, over two different fill values: equal results show that its module writes it.
    owners = list(_buffer_owners(model))
    if not owners:
        return
    with torch.random.fork_rng(devices=[]):
        first = _compute_buffers(owners, 0)
        second = _compute_buffers(owners, 1)
    lost = [name for name, buffer in first.items() if not _equal(buffer, second[name])]
    if lost:
        for owner in owners:
            _set_buffers(owner, owner.buffers)
        raise MetaBufferError(
            f"{', '.join(lost)}: on the meta device, not stored in checkpoints, and not computed when the module is "
            "initialized. Build the model under fsdp_runtime.meta_device(), which allocates buffers, or compute them "
            "in the module's reset_parameters()"
        )
    logger.debug("computed %d buffers of %d modules", len(first), len(owners))


def _buffer_owners(model: nn.Module) -> Iterator[_BufferOwner]:
    pretrained = {path: module for path, module in model.named_modules() if is_transformers_model(module)}
    for path, module in model.named_modules():
        persistent = persistent_buffers(module)
        buffers = {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and name not in persistent
        }
        if buffers:
            parents = [prefix for prefix in pretrained if prefix in ("", path) or path.startswith(f"{prefix}.")]
            yield _BufferOwner(path, module, buffers, pretrained[max(parents, key=len)] if parents else None)


def _compute_buffers(owners: list[_BufferOwner], before: int) -> dict[str, Tensor]:
    """Compute the buffers over tensors filled with ``before``, leave them on their modules, return them by name."""
    torch.manual_seed(0)  # a random buffer must be equal on every rank and in both passes
    results: dict[str, Tensor] = {}
    for owner in owners:
        _set_buffers(owner, {name: torch.full_like(b, before, device="cpu") for name, b in owner.buffers.items()})
        if owner.pretrained is not None:
            initialize_module(owner.pretrained, owner.module)
        elif callable(reset := getattr(owner.module, "reset_parameters", None)):
            reset()
        prefix = f"{owner.path}." if owner.path else ""
        results.update({prefix + name: getattr(owner.module, name) for name in owner.buffers})
    return results


def _set_buffers(owner: _BufferOwner, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(owner.module, name, buffer)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and not one.is_meta and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
