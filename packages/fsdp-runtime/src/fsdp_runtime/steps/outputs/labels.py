"""The loss that a model computes itself from ``labels``, where its logits are sharded on the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.wrap import hook_forward

_has_labels = ContextVar("has_labels", default=False)


def gather_logits_for_labels(model: nn.Module, heads: Iterable[str]) -> None:
    """Let a model, or the one inside a ``PeftModel``, gather its logits in each forward that gets ``labels``."""
    # Losses of transformers compare plain logits with the labels. A ``loss_function`` whose ``takes_sharded_logits`` is
    # true gets them sharded, as that of :class:`fsdp_runtime.trainers.MeshTrainer`.
    for path in heads:
        hook_forward(model.get_submodule(path), "gathers logits for labels", after=_gather)
    hook_forward(base_model(model), "notices labels", before=_begin, after=_end, always=True)


def _begin(model: nn.Module, args: Any, kwargs: Any) -> None:
    takes_sharded = getattr(getattr(model, "loss_function", None), "takes_sharded_logits", False)
    _has_labels.set(kwargs.get("labels") is not None and not takes_sharded)


def _end(model: nn.Module, args: Any, output: Any) -> None:
    _has_labels.set(False)


def _gather(head: nn.Module, args: Any, output: Any) -> Any:
    return output.full_tensor() if _has_labels.get() and isinstance(output, DTensor) else output
