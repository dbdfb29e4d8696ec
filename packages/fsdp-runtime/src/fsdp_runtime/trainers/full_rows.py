"""Full rows for a model under context parallelism: trainers give every rank of ``cp`` the same batch.

A hook in front of the model's own hook takes this rank's tokens of the inputs, padded to a divisible length.  Per-token
results, such as log-probabilities, are gathered.  Every rank then has the loss of the full rows and its own tokens'
part of the gradient, which FSDP2 sums over ``cp``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._peft_compat import base_model
from fsdp_runtime._transformers_compat.models import scores_rows
from fsdp_runtime.errors import OptionError
from fsdp_runtime.mesh import axis_size
from fsdp_runtime.steps.context import step as context
from fsdp_runtime.trainers.rl_logprobs_backend import rl_logprobs
from fsdp_runtime.wrap import effects_of, hook_model


@dataclass(frozen=True, eq=False)
class FullRows:
    """The rows of one forward."""

    layout: context.SequenceLayout  # the tokens of each rank, of rows with padding
    length: int  # tokens of a row without it
    group: dist.ProcessGroup  # the ranks of ``cp``
    given: dict[str, Any]  # arguments that need full rows: ``labels`` and how to count them

    def shard(self, values: Tensor, fill: int = 0) -> Tensor:
        """Return this rank's tokens of ``[batch, length, ...]``."""
        return self.layout.shard(context.padded(values, self.layout.length, fill))

    def gather(self, values: Tensor) -> Tensor:
        """Return ``[batch, length, ...]`` from this rank's tokens; each rank keeps its own part of the gradient."""
        permutation = self.layout.permutation.to(values.device)
        return rl_logprobs().gather_sequence(values, permutation, self.group, dim=1)[:, : self.length]


_EFFECT = "takes full rows"
_rows: ContextVar[FullRows | None] = ContextVar("rows", default=None)


def rows_in_force() -> FullRows | None:
    """Return the full rows of the running forward, ``None`` without context parallelism."""
    return _rows.get()


def take_full_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let a model under context parallelism take full rows and labels; once per model."""
    if axis_size(mesh, "cp") == 1 or not context.under_context_parallelism(model) or _EFFECT in effects_of(model):
        return
    hook_model(model, _EFFECT, partial(_before, context.attention_of(model)), _after, first=True)


@contextmanager
def part_of_rows(model: nn.Module, **inputs: Any) -> Iterator[tuple[FullRows, dict[str, Any]]]:
    """Yield the rows of full ``inputs`` and this rank's inputs of a model's trunk, inside the model's forward."""
    complete = context.inputs_of(model)
    was_whole, complete.attention.whole_rows = complete.attention.whole_rows, False
    try:
        _, inputs = _before(complete.attention, model, (), inputs)
        rows = cast(FullRows, _rows.get())
        yield rows, complete(model, (), inputs)[1]
    finally:
        complete.end()
        complete.attention.whole_rows = was_whole
        _rows.set(None)


def _before(attention: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if attention.whole_rows:
        return args, kwargs
    tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
    if tokens is None:
        return args, kwargs  # the hook of context parallelism names the missing inputs
    ranks, length = dist.get_world_size(attention.group), tokens.shape[1]
    multiple = attention.layout(1 if attention.load_balancer is None else 2).multiple
    layout = attention.layout(-(-length // multiple) * multiple // ranks)
    model: Any = base_model(module)
    scores = scores_rows(model)  # context parallelism gathers them, and they have a separate loss
    taken = () if scores else ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")
    fills = {"input_ids": _padding_id(model, kwargs)} if scores and layout.length > length else {}
    fills["subtree_end"] = layout.length
    rows = FullRows(
        layout, length, attention.group, {name: kwargs[name] for name in taken if kwargs.get(name) is not None}
    )
    # Positions give the documents of any part.
    left = taken if kwargs.get("position_ids") is None else (*taken, *context.BOUNDARIES)
    kwargs = {name: value for name, value in kwargs.items() if name not in left}
    if layout.length > length and kwargs.get("position_ids") is None and kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    for name, value in kwargs.items():
        if name == "position_ids" and isinstance(value, Tensor):
            kwargs[name] = _positions(value, layout)
        elif isinstance(value, Tensor) and value.shape[:2] == tokens.shape[:2]:
            kwargs[name] = rows.shard(value, fills.get(name, 0))
    _rows.set(rows)
    return args, kwargs


def _after(module: nn.Module, args: Any, output: Any) -> Any:
    rows = _rows.get()
    _rows.set(None)
    if rows is None or output is None or not isinstance(getattr(output, "logits", None), Tensor):
        return output
    model: Any = base_model(module)
    if scores_rows(model):
        return output
    if "labels" in rows.given:
        loss = getattr(model, "loss_function", None)
        if not getattr(loss, "takes_sharded_logits", False):
            raise OptionError(f"the loss of {type(model).__name__} is not the causal language-modelling loss: use cp=1")
        options = {name: rows.given[name] for name in ("num_items_in_batch", "shift_labels") if name in rows.given}
        token = _rows.set(rows)
        try:
            output.loss = cast(Any, loss)(output.logits, rows.given["labels"], **options)
        finally:
            _rows.reset(token)
        if getattr(output, "aux_loss", None) is not None:
            output.loss = output.loss + model.config.get_text_config().router_aux_loss_coef * output.aux_loss
    if not model.training or "labels" not in rows.given:
        logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
        kept = rows.given.get("logits_to_keep", 0)
        full = rows.gather(logits)
        output.logits = full[:, -kept:] if isinstance(kept, int) else full[:, kept]
    return output


def _padding_id(model: Any, kwargs: Mapping[str, Any]) -> int:
    """Return the padding id; no token of a row after it is scored."""
    pad_token_id: int | None = model.config.get_text_config().pad_token_id
    if pad_token_id is None or kwargs.get("input_ids") is None:
        raise OptionError(
            "rows that are scored at their last token cannot be padded over cp: set the config's pad_token_id and give "
            "input_ids, or rows of a length that divides"
        )
    return pad_token_id


def _positions(values: Tensor, layout: context.SequenceLayout) -> Tensor:
    """This rank's position ids ``[..., batch, length]``; padding is a separate document."""
    if missing := layout.length - values.shape[-1]:
        more = torch.arange(missing, device=values.device, dtype=values.dtype)
        values = torch.cat([values, more.expand(*values.shape[:-1], missing)], dim=-1)
    return layout.shard(values, dim=-1)
