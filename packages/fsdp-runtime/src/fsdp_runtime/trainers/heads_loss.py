"""The loss of multi-token heads in trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fsdp_runtime.errors import OptionError
from fsdp_runtime.steps import MultiTokenHeads
from fsdp_runtime.steps.context.step import under_context_parallelism


def trained_heads(model: Any) -> MultiTokenHeads | None:
    """Return the heads of a model if a trainer adds their loss."""
    heads = MultiTokenHeads.of(model)
    return None if heads is None or heads.loss_scaling_factor is None else heads


def check_heads(trainer: Any, *, takes_labels: bool) -> None:
    """Raise :class:`OptionError` if the heads of a trainer's model get no labels."""
    if trained_heads(trainer.model) is None:
        return
    names = [name for name in ("compute_loss_func", "label_smoother") if getattr(trainer, name, None) is not None]
    reason = f"its loss is {names[0]}'s" if names else ""
    if under_context_parallelism(trainer.model):
        reason = "it computes its loss from the full rows of cp"
    if not takes_labels or reason:
        raise OptionError(
            f"loss_scaling_factor of multi-token heads: {type(trainer).__name__} gives them no labels"
            f"{', as ' + reason if reason else ''}; train them in transformers' Trainer or SFTTrainer without it, or "
            "set loss_scaling_factor=None and add heads.loss in a loop"
        )


def add_loss_of_heads(compute: Callable[[], Any], model: Any, items: Any, ranks: int) -> Any:
    """Add the weighted loss of a model's heads, ``ranks`` times, to a trainer's loss alone or before its outputs."""
    heads = trained_heads(model)
    if heads is None or not torch.is_grad_enabled():
        return compute()
    heads.num_items_in_batch = items  # SFTTrainer does not pass it on
    loss = compute()
    further = cast(Tensor, heads.loss) * (cast(float, heads.loss_scaling_factor) * ranks)
    return (loss[0] + further, *loss[1:]) if isinstance(loss, tuple) else loss + further
