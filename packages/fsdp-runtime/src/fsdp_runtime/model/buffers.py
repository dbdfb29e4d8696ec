"""Buffers that no checkpoint holds (rotary frequencies, embedding scales) on a model built on the meta device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fsdp_runtime import _transformers_compat as transformers_compat
from fsdp_runtime._torch_compat import persistent_buffers
from fsdp_runtime.errors import MetaBufferError

logger = logging.getLogger(__name__)


@contextmanager
def meta_device() -> Iterator[None]:
    """Build a model with its parameters on the meta device and its buffers real.

    ``torch.device("meta")`` works too, but then non-persistent buffers have to be computed again; here the
    constructor computes them.  Parameters are allocated one at a time and freed as soon as they are registered.
    """

    def to_meta(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class _Holder:
    """A module that owns non-persistent buffers on the meta device, and the ``PreTrainedModel`` around it."""

    path: str
    module: nn.Module
    buffers: dict[str, Tensor]
    owner: Any


def compute_meta_buffers(model: nn.Module) -> None:
    """Compute every non-persistent buffer that is on the meta device, on the CPU, as a model built there has it.

    A ``PreTrainedModel`` does so by its own initialisation, any other module by its ``reset_parameters()``.  Each
    buffer is computed twice over different contents: one that comes out the same was written, whatever its
    dtype; one that does not is an error, and then nothing has changed.

    Raises:
        MetaBufferError: buffers that nothing computes.
    """
    holders = list(_holders(model))
    if not holders:
        return
    with torch.random.fork_rng(devices=[]):
        first = _computed(holders, 0)
        second = _computed(holders, 1)
    lost = [name for name, buffer in first.items() if not _equal(buffer, second[name])]
    if lost:
        for holder in holders:
            _set(holder, holder.buffers)
        raise MetaBufferError(
            f"{', '.join(lost)}: on the meta device, in no checkpoint, and not computed when the module is "
            "initialised. Build the model under fsdp_runtime.meta_device(), which keeps buffers real, or compute them "
            "in the module's reset_parameters()"
        )
    logger.debug("computed %d buffers of %d modules", len(first), len(holders))


def _holders(model: nn.Module) -> Iterator[_Holder]:
    owners = {
        path: module for path, module in model.named_modules() if transformers_compat.is_transformers_model(module)
    }
    for path, module in model.named_modules():
        persistent = persistent_buffers(module)
        buffers = {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and name not in persistent
        }
        if buffers:
            around = [prefix for prefix in owners if prefix in ("", path) or path.startswith(f"{prefix}.")]
            yield _Holder(path, module, buffers, owners[max(around, key=len)] if around else None)


def _computed(holders: list[_Holder], before: int) -> dict[str, Tensor]:
    """The buffers by full name, computed over tensors full of ``before``; they stay on their modules."""
    torch.manual_seed(0)  # a buffer drawn at random must come out alike on every rank and in both passes
    results: dict[str, Tensor] = {}
    for holder in holders:
        _set(holder, {name: torch.full_like(b, before, device="cpu") for name, b in holder.buffers.items()})
        if holder.owner is not None:
            transformers_compat.initialize_module(holder.owner, holder.module)
        elif callable(reset := getattr(holder.module, "reset_parameters", None)):
            reset()
        prefix = f"{holder.path}." if holder.path else ""
        results.update({prefix + name: getattr(holder.module, name) for name in holder.buffers})
    return results


def _set(holder: _Holder, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(holder.module, name, buffer)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and not one.is_meta and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
