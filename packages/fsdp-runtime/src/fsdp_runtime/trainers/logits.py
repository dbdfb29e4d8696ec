"""Losses and log-probabilities from logits that are sharded on the vocabulary, and the loss of multi-token heads.

TRL's trainers call ``model(..., labels=labels, fused_lm_head=True)`` for log-probabilities in place of logits; its own
``add_fused_lm_head`` gathers the head's full weight on every rank.  The function here runs the sharded head.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._transformers_compat.models import calls_loss_function, with_loss_function
from fsdp_runtime.errors import OptionError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.steps.context.step import under_context_parallelism
from fsdp_runtime.swaps import swapped
from fsdp_runtime.trainers.full_rows import FullRows, rows_in_force, take_full_rows
from fsdp_runtime.trainers.rl_logprobs_backend import rl_logprobs
from fsdp_runtime.wrap import hook_forward, replace_forward


def full(values: Any) -> Any:
    """Gather the DTensors in nested tuples, lists and dicts into plain tensors; collective."""
    return recursively_apply(DTensor.full_tensor, values, test_type=lambda value: isinstance(value, DTensor))


def causal_lm_loss(loss_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss for sharded logits; plain logits go to transformers' ``ForCausalLMLoss``."""

    def loss(
        logits: Tensor,
        labels: Tensor | None = None,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        rows = rows_in_force()
        if rows is None and not isinstance(logits, DTensor):
            options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **kwargs}
            if shift_labels is not None:
                options["shift_labels"] = shift_labels
            return loss_function(logits, labels, *args, **options)
        if shift_labels is None:
            shift_labels = rl_logprobs().next_token_targets(labels, ignore_index=ignore_index)
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        own = shift_labels if rows is None else rows.shard(shift_labels, ignore_index)
        logprobs = rl_logprobs().token_statistics(logits, own, ignore_index=ignore_index).logprobs
        total = -(logprobs if rows is None else rows.gather(logprobs)).sum()
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    return loss


def loss_of_sharded_logits(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``compute_loss_func`` with a plain loss; its errors name sharded logits as their cause."""

    @wraps(loss_function)
    def loss(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            value = loss_function(outputs, *args, **kwargs)
            return value.full_tensor().clone() if isinstance(value, DTensor) else value  # trainers multiply it in place
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if not isinstance(getattr(outputs, "logits", None), DTensor):
                raise
            raise OptionError(
                f"compute_loss_func raised {type(error).__name__} on logits that are sharded on the vocabulary "
                f"(outputs.logits is a DTensor): {error}. Compute the loss with rl_logprobs.token_statistics, which "
                "takes them, or gather them for every loss: parallelize(..., logits='full'), or "
                "parallelize_kwargs={'logits': 'full'}"
            ) from error

    return loss


def label_smoother_for(label_smoother: Callable[..., Tensor], model: nn.Module) -> Callable[..., Tensor]:
    """Return transformers' label smoother, right for a sharded model."""
    # The trainer decides by the name of the model's class whether to shift labels, and FSDP2 gives the model a class of
    # another name.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return partial(label_smoother, shift_labels=any(cls.__name__ in causal for cls in type(model).__mro__))


def compute_losses_on(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let a sharded model compute its loss from sharded logits, and from full rows under context parallelism."""
    # Other losses than the causal language model's, and losses that the model's own code computes, get gathered
    # logits (``fsdp_runtime.steps.outputs.full_tensors.gather_logits_for_labels``).
    from transformers.loss.loss_utils import ForCausalLMLoss

    base = base_model(model)
    if getattr(base, "loss_function", None) is ForCausalLMLoss and calls_loss_function(base):
        base.loss_function = causal_lm_loss(ForCausalLMLoss)
        base.loss_function.takes_sharded_logits = True
    take_full_rows(model, mesh)


class CountOfLabels:
    """Detect a model that gets all ranks' labels inside the ``with`` and computes its loss without their count."""

    # Examples: classes with their own loss code (BERT, BART, T5), and classes that pass nothing on (score heads).

    def __init__(self, model: Any) -> None:
        self._model, self._given, self._read = model, False, False
        self._outputs: list[Any] = []

    def __enter__(self) -> CountOfLabels:
        self._stack = ExitStack()
        handle = hook_forward(self._model, "notices the number of labels", before=self._notice, first=True)
        self._stack.callback(hook_forward(self._model, "notes its loss", after=self._keep).remove)
        self._stack.callback(handle.remove)
        own = getattr(self._model, "loss_function", None)
        if own is not None and not getattr(own, "takes_sharded_logits", False):
            self._stack.enter_context(with_loss_function(self._model, partial(self._loss, own)))
        elif own is not None:
            self._read = True
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def is_ignored(self) -> bool:
        """True if the loss is a mean over the labels that the model was given."""
        return self._given and not self._read

    def is_of_model(self, loss: Tensor) -> bool:
        """Return False if a trainer's own code computed a loss in place of the model's."""
        return not self._outputs or any(loss is getattr(output, "loss", None) for output in self._outputs)

    def _keep(self, _model: nn.Module, _args: Any, output: Any) -> None:
        self._outputs.append(output)

    def _notice(self, _model: nn.Module, _args: Any, kwargs: Any) -> None:
        self._given |= all(kwargs.get(name) is not None for name in ("labels", "num_items_in_batch"))

    def _loss(self, own: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self._read |= kwargs.get("num_items_in_batch") is not None
        return own(*args, **kwargs)


def per_position(
    logits: Tensor, targets: Tensor, *, temperature: float, fields: tuple[str, ...], rows: FullRows | None = None
) -> dict[str, Any]:
    """Return log-probabilities and further ``fields`` of each target ``[batch, seq]``, zero at targets -100."""
    # Logits belong to the last positions, ``[batch, kept, vocab]``, sharded or plain; with ``rows`` to this
    # rank's tokens. ``fields`` beside ``log_probs``: ``entropy`` (nats), ``is_top1`` (the target is the most probable
    # token), and without gradient ``mean_logits`` and ``log_sum_sq_probs``.
    if rows is not None:
        statistics = _statistics(logits, rows.shard(targets, -100), temperature, fields)
        return {name: rows.gather(value) for name, value in statistics.items()}
    before = targets.size(1) - logits.size(1)
    statistics = _statistics(logits, targets[:, before:], temperature, fields)
    return {name: nn.functional.pad(value, (before, 0)) for name, value in statistics.items()}


def _statistics(logits: Tensor, targets: Tensor, temperature: float, fields: tuple[str, ...]) -> dict[str, Tensor]:
    statistics = rl_logprobs().token_statistics(
        logits, targets, temperature=temperature, entropy="entropy" in fields, argmax="is_top1" in fields
    )
    scored = targets != -100
    values: dict[str, Tensor] = {"log_probs": statistics.logprobs}
    if "entropy" in fields:
        values["entropy"] = statistics.entropy
    if "is_top1" in fields:
        values["is_top1"] = (statistics.argmax == targets) & scored
    with torch.no_grad():
        if "log_sum_sq_probs" in fields:  # log of the sum of squared probabilities, from two partition sums
            twice = rl_logprobs().token_statistics(logits.detach(), targets, temperature=temperature / 2)
            values["log_sum_sq_probs"] = twice.logsumexp - 2 * statistics.logsumexp.detach()
        if "mean_logits" in fields:
            total = logits.detach().sum(-1, dtype=torch.float32)
            values["mean_logits"] = (full(total) / (logits.size(-1) * temperature)).masked_fill(~scored, 0.0)
    return values


_FIELDS = frozenset({"log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs"})


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Patch ``model.forward`` as ``trl.trainer.utils.add_fused_lm_head`` does, with the same arguments."""
    # The model is no ``PeftModel``.
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
        elif takes_logits_to_keep and shift_labels is None:  # the positions from the first that predicts a label
            columns = (labels != -100).any(dim=0).nonzero()
            first = int(columns[0]) if len(columns) else labels.size(1)
            kwargs["logits_to_keep"] = max(1, labels.size(1) - max(first, 1) + 1)
        plain = forward(*args, **kwargs)
        targets = rl_logprobs().next_token_targets(labels) if shift_labels is None else shift_labels
        statistics = per_position(plain.logits, targets, temperature=temperature, fields=outputs, rows=rows)
        mask = targets != -100
        if shift_labels is None:  # the last position predicts no label
            # Copies: FSDP2 hooks the outputs, and a view would lose its hook by an in-place operation.
            mask, statistics = mask[:, :-1], {name: value[:, :-1].clone() for name, value in statistics.items()}
        items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = -statistics["log_probs"].sum() / items
        if (aux_loss := getattr(plain, "aux_loss", None)) is not None:  # of a mixture
            loss = loss + getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **statistics)

    replace_forward(model, types.MethodType(fused_forward, model))


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
    with swapped(heads, num_items_in_batch=items):  # SFTTrainer does not pass it on
        loss = compute()
    summed = items is not None and trainer.args.average_tokens_across_devices  # and multiplied by the ranks
    further = heads.loss * heads.loss_scaling_factor * (trainer.accelerator.num_processes if summed else 1)
    return (loss[0] + further, *loss[1:]) if isinstance(loss, tuple) else loss + further
