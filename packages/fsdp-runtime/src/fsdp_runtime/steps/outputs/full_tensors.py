"""Full plain tensors in the outputs of a sharded model, for code that cannot read a rank's part.

Logits are sharded on the vocabulary; ``generate`` and a model's loss from ``labels`` read them.  Under sequence
parallelism, hidden states between blocks are DTensors sharded on the sequence.  A plain layer cannot read them, and
torch indexes them by a slice only, while ``logits_to_keep`` may be indices.  Attention maps are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_runtime._transformers_compat.models import asks_for, is_transformers_model
from fsdp_runtime.errors import LayoutError
from fsdp_runtime.model.generators import Generators
from fsdp_runtime.wrap import hook_forward
from tp_plans import ColwiseParallel, Shard
from tp_plans.runtime import computes, plain_full_tensor

#: The model that indexes its trunk's last hidden states: its forward got indices as ``logits_to_keep``.
_indexes: ContextVar[nn.Module | None] = ContextVar("indexes", default=None)
_has_labels = ContextVar("has_labels", default=False)


def refuse_attention_maps(model: nn.Module, axis: str) -> None:
    """Let every transformers model in a model refuse a forward that asks for attention maps."""

    def refuse(module: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
        if asks_for(module, kwargs, "attentions"):
            raise LayoutError(
                f"output_attentions=True: a rank of {axis} computes a part of each attention map: leave it out, or use "
                f"a mesh without {axis}"
            )

    for module in filter(is_transformers_model, model.modules()):
        hook_forward(module, "refuses attention maps", before=refuse)


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
            hook_forward(module, "gathers logits for labels", after=_gather_for_labels)
    hook_forward(model, "notices labels", before=_notice_labels, after=_forget_labels, always=True)


def _notice_labels(model: nn.Module, _args: Any, kwargs: Any) -> None:
    takes_sharded = getattr(getattr(model, "loss_function", None), "takes_sharded_logits", False)
    _has_labels.set(kwargs.get("labels") is not None and not takes_sharded)


def _forget_labels(_model: nn.Module, _args: Any, _output: Any) -> None:
    _has_labels.set(False)


def _gather_for_labels(_head: nn.Module, _args: Any, output: Any) -> Any:
    if not _has_labels.get() or not isinstance(output, DTensor):
        return output
    return _Output.apply(output.full_tensor())  # type: ignore[no-untyped-call]


class _Output(torch.autograd.Function):
    """Hand on gathered logits, a view in torch, without a copy and as no view: FSDP2 warns of views."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def return_full_hidden_states(model: nn.Module, *, over_cp: bool = False) -> None:
    """Let every transformers model in a model return full plain tensors in its tuples of hidden states."""
    # In a forward with indices as ``logits_to_keep``, the last hidden states are full and plain too; context
    # parallelism makes indices of a number of tokens.
    begin = partial(_notice_indices, over_cp)
    for module in filter(is_transformers_model, model.modules()):
        hook_forward(module, "gathers hidden states", before=begin, after=_with_full_states, always=True)


def _notice_indices(over_cp: bool, module: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
    kept = kwargs.get("logits_to_keep")
    if _indexes.get() is None and (isinstance(kept, Tensor) or (over_cp and kept)):
        _indexes.set(module)


def _with_full_states(module: nn.Module, _args: Any, output: Any) -> Any:
    """Gather the members of an output's tuples: hidden states, without logits and the last state."""
    if _indexes.get() is module:
        _indexes.set(None)
    if isinstance(output, Mapping):  # a ModelOutput keeps attributes and entries equal
        for name, value in output.items():
            is_indexed = name == "last_hidden_state" and _indexes.get() is not None
            output[name] = _plain(value) if is_indexed else _full(value)  # type: ignore[index]
        return output
    return tuple(map(_full, output)) if type(output) is tuple else output


def _full(value: Any) -> Any:
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _plain(value: Any) -> Any:
    return plain_full_tensor(value, value.device_mesh) if isinstance(value, DTensor) else value


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
