"""TRL's fused LM head for models with logits sharded on the vocabulary.

TRL's trainers call ``model(..., labels=labels, fused_lm_head=True)`` for log-probabilities in place of logits; its own
``add_fused_lm_head`` gathers the head's full weight on every rank.  The function here runs the sharded head.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from torch import Tensor

from fsdp_runtime.errors import OptionError
from fsdp_runtime.trainers.full_rows import rows_in_force
from fsdp_runtime.trainers.logits import next_labels, per_position, scored_positions
from fsdp_runtime.wrap import replace_forward

_FIELDS = frozenset({"log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs"})


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Patch ``model.forward`` as ``trl.trainer.utils.add_fused_lm_head`` does, with the same arguments."""
    # The model is no ``PeftModel``; ``outputs`` may be ``log_probs``, ``entropy``, ``is_top1``, ``mean_logits`` and
    # ``log_sum_sq_probs``.
    if cast_lm_head_to_fp32:
        raise OptionError("cast_lm_head_to_fp32=True replaces the sharded head: keep it False, or load float32 weights")
    if unknown := sorted(set(outputs) - _FIELDS):
        raise OptionError(f"per-token {', '.join(unknown)} cannot be computed from sharded logits")
    from trl.trainer.utils import FusedCausalLMOutput

    forward = model.forward
    takes_logits_to_keep = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    @functools.wraps(type(model).forward)  # generate validates its arguments against this signature
    def fused_forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Any = None,
        shift_labels: Any = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return forward(*args, **{name: value for name, value in given.items() if value is not None}, **kwargs)
        kwargs["use_cache"] = False
        rows = rows_in_force()
        if rows is not None:  # the hook of full rows has taken them: the model runs on this rank's tokens
            labels, num_items_in_batch = rows.given.get("labels"), rows.given.get("num_items_in_batch")
            shift_labels = rows.given.get("shift_labels")
        elif takes_logits_to_keep and shift_labels is None:
            kwargs["logits_to_keep"] = scored_positions(labels)
        plain = forward(*args, **kwargs)
        targets = next_labels(labels) if shift_labels is None else shift_labels
        statistics = per_position(plain.logits, targets, temperature=temperature, fields=outputs, rows=rows)
        mask = targets != -100
        if shift_labels is None:  # the last position predicts no label
            mask, statistics = mask[:, :-1], {name: value[:, :-1] for name, value in statistics.items()}
        loss, aux_loss = _loss(self.config, plain, statistics["log_probs"], mask, num_items_in_batch)
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **statistics)

    replace_forward(model, types.MethodType(fused_forward, model))


def _loss(config: Any, plain: Any, log_probs: Tensor, mask: Tensor, items: Any) -> tuple[Tensor, Any]:
    """Return the loss with a mixture's auxiliary loss, and the auxiliary loss."""
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
    if (aux_loss := getattr(plain, "aux_loss", None)) is not None:
        loss = loss + getattr(config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
    return loss, aux_loss
