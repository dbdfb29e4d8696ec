"""``generate`` of a model whose logits are sharded on the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.wrap import hook_forward


def gather_logits(model: nn.Module) -> Any:
    """Let a model return plain logits; returns a handle whose ``remove`` ends it."""

    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(getattr(output, "logits", None), DTensor):
            output.logits = output.logits.full_tensor()
        return output

    return hook_forward(model, "gathers logits", after=gather)


@contextmanager
def full_logits(model: nn.Module) -> Iterator[nn.Module]:
    """Let a model return plain logits inside the ``with``, for ``generate``, which asks for the last position only."""
    handle = gather_logits(model)
    try:
        yield model
    finally:
        handle.remove()


def gather_logits_in_generate(model: nn.Module) -> None:
    """Let ``generate`` of a model, or of the one inside a ``PeftModel``, read full logits."""
    model = base_model(model)
    if callable(getattr(model, "generate", None)):
        model.__dict__["generate"] = _Generate(model)


@dataclass(frozen=True, eq=False)
class _Generate:
    """``generate`` of one model; a copy of the model gets one of its own."""

    model: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with full_logits(self.model):
            return type(self.model).generate(self.model, *args, **kwargs)
