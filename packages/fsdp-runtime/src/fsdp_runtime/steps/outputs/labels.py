"""A model's loss from ``labels``, with logits sharded on the vocabulary."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, TypeGuard

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime.wrap import hook_forward
from tp_plans import ColwiseParallel, Shard

_has_labels = ContextVar("has_labels", default=False)


def has_sharded_logits(style: object) -> TypeGuard[ColwiseParallel]:
    """Return True for a head; layers of blocks return local features, or DTensors sharded on rows or sequence."""
    inside = (Shard(0), Shard(1))
    return isinstance(style, ColwiseParallel) and not style.use_local_output and style.output_layouts not in inside


def gather_logits_for_labels(model: nn.Module) -> None:
    """Let a model without peft's wrapper gather its logits in each forward that gets ``labels``."""
    # Losses of transformers compare plain logits with the labels. A ``loss_function`` with a true
    # ``takes_sharded_logits``, such as the loss of :class:`fsdp_runtime.trainers.MeshTrainer`, gets sharded logits.
    for module in model.modules():
        if has_sharded_logits(getattr(getattr(module, "tp_style", None), "style", None)):
            hook_forward(module, "gathers logits for labels", after=_gather)
    hook_forward(model, "notices labels", before=_begin, after=_end, always=True)


def _begin(model: nn.Module, args: Any, kwargs: Any) -> None:
    takes_sharded = getattr(getattr(model, "loss_function", None), "takes_sharded_logits", False)
    _has_labels.set(kwargs.get("labels") is not None and not takes_sharded)


def _end(model: nn.Module, args: Any, output: Any) -> None:
    _has_labels.set(False)


def _gather(head: nn.Module, args: Any, output: Any) -> Any:
    return output.full_tensor() if _has_labels.get() and isinstance(output, DTensor) else output
