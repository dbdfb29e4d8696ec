"""Tensors that outlive ``torch.inference_mode``: torch refuses inference tensors in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.wrap import hook_forward

_T = TypeVar("_T")


@contextmanager
def leave_inference_mode() -> Iterator[None]:
    """Leave ``torch.inference_mode``, if it is on, without enabling gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def without_inference_mode(items: Iterator[_T]) -> Iterator[_T]:
    """Yield the items of a generator that runs outside ``torch.inference_mode`` and without gradients."""
    # A decorator would keep each item alive until the generator yields the next.
    while True:
        with leave_inference_mode():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
        del item


def gather_outside_inference_mode(model: nn.Module) -> None:
    """Allow ``torch.inference_mode`` in the first forward of a root FSDP module."""
    # FSDP2 keeps the tensors of its first gather.  Training could not write to tensors made in inference mode (torch
    # 2.11 to 2.15).

    def gather_once(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if not torch.is_inference_mode_enabled():
            return
        handle.remove()
        with torch.inference_mode(False):
            for module in model.modules():
                if isinstance(module, FSDPModule) and not runtime_state(module).unsharded:
                    module.unshard()
                    module.reshard()

    handle = hook_forward(model, "gathers once outside of inference mode", before=gather_once, first=True)
