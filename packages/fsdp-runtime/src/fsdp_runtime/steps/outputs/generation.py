"""``generate`` of a model with logits sharded on the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime.model.generators import Generators
from fsdp_runtime.wrap import hook_forward
from tp_plans.runtime import computes


def gather_logits(model: nn.Module) -> Any:
    """Let a model return plain logits until ``remove`` of the returned handle."""

    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(getattr(output, "logits", None), DTensor):
            output.logits = output.logits.full_tensor()
        return output

    return hook_forward(model, "gathers logits", after=gather)


@contextmanager
def full_logits(model: nn.Module) -> Iterator[nn.Module]:
    """Let a model return plain logits inside the ``with``.  ``generate`` asks for the last position only."""
    handle = gather_logits(model)
    try:
        yield model
    finally:
        handle.remove()


def gather_logits_in_generate(model: nn.Module, tp: DeviceMesh) -> None:
    """Let ``generate`` of a model read full logits and sample the same tokens on every rank of ``tp``."""
    if callable(getattr(model, "generate", None)):
        model.__dict__["generate"] = _Generate(model, tp)


@dataclass(frozen=True, eq=False)
class _Generate:
    """``generate`` of one model; a copy of the model gets a copy."""

    model: Any
    tp: DeviceMesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with full_logits(self.model), _same_draws(self.tp):
            return type(self.model).generate(self.model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Generate:
        return _Generate(deepcopy(self.model, memo), self.tp)


@contextmanager
def _same_draws(tp: DeviceMesh) -> Iterator[None]:
    """Draw the first rank's random numbers on all ranks, then restore states that differed."""
    # Ranks that sample different tokens would continue different rows.
    if not computes(tp):
        yield
        return
    generators = Generators(tp.device_type)
    own, first = generators.get(), generators.first_of(tp.get_group())
    differs = [not torch.equal(state, other) for state, other in zip(first, own, strict=True)]
    generators.set(first)
    try:
        yield
    finally:
        if any(differs):
            drawn = generators.get()
            generators.set([state if other else now for state, other, now in zip(own, differs, drawn, strict=True)])
