"""The loss of multi-token heads in trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.steps.context.step import under_context_parallelism


def _heads(model: Any) -> Any:
    """Return the heads of a model if a trainer adds their loss."""
    heads = runtime_state(base_model(model)).multi_token_heads
    return None if heads is None or heads.loss_scaling_factor is None else heads


def check_heads(trainer: Any) -> None:
    """Raise :class:`OptionError` if a trainer is to add the loss of heads that get no labels from it."""
    heads = _heads(trainer.model)
    if heads is None:
        return
    classes = {cls.__name__ for cls in type(trainer).__mro__}
    has_separate_loss = "TrlMixin" in classes and "SFTTrainer" not in classes
    reasons = {name: getattr(trainer, name, None) for name in ("compute_loss_func", "label_smoother")}
    reasons |= {"a loss of log-probabilities": has_separate_loss, "cp": under_context_parallelism(trainer.model)}
    if reason := next((name for name, value in reasons.items() if value), ""):
        raise OptionError(
            f"loss_scaling_factor={heads.loss_scaling_factor}: {type(trainer).__name__} with {reason} gives "
            "multi-token heads no labels: use Trainer or SFTTrainer without it, or add heads.loss in a loop"
        )


def with_loss_of_heads(compute: Callable[[], Any], trainer: Any, model: Any, items: Any) -> Any:
    """Compute a trainer's loss, alone or before its outputs, with the weighted loss of the model's heads."""
    heads = _heads(model)
    if heads is None or not torch.is_grad_enabled():
        return compute()
    heads.num_items_in_batch = items  # SFTTrainer does not pass it on
    try:
        loss = compute()
    finally:
        heads.num_items_in_batch = None
    summed = items is not None and trainer.args.average_tokens_across_devices  # and multiplied by the ranks
    further = heads.loss * heads.loss_scaling_factor * (trainer.accelerator.num_processes if summed else 1)
    return (loss[0] + further, *loss[1:]) if isinstance(loss, tuple) else loss + further
