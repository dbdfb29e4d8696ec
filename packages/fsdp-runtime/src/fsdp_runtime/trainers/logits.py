"""Losses and log-probabilities from logits that are sharded on the vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.rl_logprobs_backend import token_statistics


def full(values: Any) -> Any:
    """Gather the DTensors in nested tuples, lists and dicts into plain tensors; collective."""
    if isinstance(values, DTensor):
        return values.full_tensor()
    if isinstance(values, (tuple, list)):
        return type(values)(full(value) for value in values)
    if isinstance(values, dict):
        return type(values)({name: full(value) for name, value in values.items()})
    return values


def causal_lm_loss(loss_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss with the signature of transformers' losses that takes sharded logits too.

    Args:
        loss_function: transformers' ``ForCausalLMLoss``, for plain logits.
    """

    def loss(
        logits: Tensor,
        labels: Tensor | None = None,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not isinstance(logits, DTensor):
            options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **kwargs}
            if shift_labels is not None:
                options["shift_labels"] = shift_labels
            return loss_function(logits, labels, *args, **options)
        targets = labels if shift_labels is None else shift_labels
        if targets is None:
            raise OptionError("a loss needs labels or shift_labels")
        statistics = token_statistics(logits, targets, shift=shift_labels is None, ignore_index=ignore_index)
        scored = targets[..., 1:] if shift_labels is None else targets
        count = (scored != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        total: Tensor = -statistics.logprobs.sum()
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    return loss


def label_smoother_for(label_smoother: Callable[..., Tensor], model: nn.Module) -> Callable[..., Tensor]:
    """Return transformers' label smoother, right for a sharded model.

    The trainer decides by the name of the model's class whether to shift labels, and FSDP2 gives the model a class of
    another name.  Logits that are sharded are refused with the fix.

    Args:
        label_smoother: transformers' ``LabelSmoother``.
        model: the model, not a ``PeftModel`` around it.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    shift = any(cls.__name__ in causal for cls in type(model).__mro__)

    def smooth(outputs: Any, labels: Tensor, shift_labels: bool = False, **kwargs: Any) -> Tensor:
        if isinstance(outputs["logits"] if isinstance(outputs, dict) else outputs[0], DTensor):
            raise OptionError("label_smoothing_factor needs plain logits: parallelize(..., logits='full')")
        return label_smoother(outputs, labels, shift_labels=shift_labels or shift, **kwargs)

    return smooth


def take_sharded_logits(model: Any) -> None:
    """Give a Hugging Face model a loss that takes sharded logits, in place of its own; once a model.

    Another loss than that of causal language models, and one that the model's code computes by itself, gets gathered
    logits (:func:`fsdp_runtime.steps.outputs.labels.gather_logits_for_labels`).

    Args:
        model: the model itself, not a ``PeftModel`` around it.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    forwards = (inspect.unwrap(vars(cls)["forward"]) for cls in type(model).__mro__ if "forward" in vars(cls))
    codes = (getattr(forward, "__code__", None) for forward in forwards)
    calls_loss = any(code is not None and "loss_function" in code.co_names for code in codes)
    if calls_loss and (own := model.loss_function) is ForCausalLMLoss:
        model.loss_function = causal_lm_loss(own)
        model.loss_function.takes_sharded_logits = True


def scored_positions(labels: Tensor) -> int:
    """How many positions at the end of the sequence predict a label: what ``logits_to_keep`` may be, at least 1."""
    columns = (labels != -100).any(dim=0).nonzero()
    first = int(columns[0]) if len(columns) else labels.size(1)
    return max(1, labels.size(1) - max(first, 1) + 1)


def per_token(logits: Tensor, labels: Tensor, *, temperature: float, entropy: bool, is_top1: bool) -> dict[str, Any]:
    """Return log-probabilities and what else is asked, all ``[batch, seq - 1]``, zero where there is no label.

    Args:
        logits: ``[batch, kept, vocab]``, those of the last positions; sharded on the vocabulary, or plain.
        labels: ``[batch, seq]``, not shifted; -100 where there is none.
        temperature: the logits are divided by this.
        entropy: compute the entropy, in nats.
        is_top1: tell where the label is the most probable token.
    """
    targets = labels[:, 1:]
    kept = min(logits.size(1) - 1, targets.size(1))
    recent = nn.functional.pad(targets[:, targets.size(1) - kept :], (0, logits.size(1) - kept), value=-100)
    found = token_statistics(logits, recent, temperature=temperature, entropy=entropy, argmax=is_top1)
    fields = {
        "log_probs": found.logprobs,
        "entropy": found.entropy,
        "is_top1": ((found.argmax == recent) & (recent != -100)).to(torch.float32) if is_top1 else None,
    }
    unscored = targets.size(1) - kept
    return {
        name: None if value is None else nn.functional.pad(value[:, :kept], (unscored, 0))
        for name, value in fields.items()
    }
