"""Hidden states of all depths and of chosen positions, under sequence parallelism.

Between blocks they are DTensors sharded on the sequence.  A plain layer cannot read them, and torch indexes them by a
slice only, while ``logits_to_keep`` may be indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.wrap import hook_forward
from tp_plans.runtime import plain_full_tensor

#: The model that indexes its trunk's last hidden states: its forward got indices as ``logits_to_keep``.
_indexes: ContextVar[nn.Module | None] = ContextVar("indexes", default=None)


def return_full_hidden_states(model: nn.Module, *, over_cp: bool = False) -> None:
    """Let every transformers model in a model return full plain tensors in its tuples of hidden states."""
    # In a forward with indices as ``logits_to_keep``, the last hidden states are full and plain too; context
    # parallelism makes indices of a number of tokens.
    begin = partial(_begin, over_cp)
    for module in model.modules():
        if is_transformers_model(module):
            hook_forward(module, "gathers hidden states", before=begin, after=_with_full_states, always=True)


def _begin(over_cp: bool, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    kept = kwargs.get("logits_to_keep")
    if _indexes.get() is None and (isinstance(kept, Tensor) or (over_cp and kept)):
        _indexes.set(module)


def _with_full_states(module: nn.Module, args: Any, output: Any) -> Any:
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
    if type(value) is not tuple or not any(isinstance(each, DTensor) for each in value):
        return value
    return tuple(map(_plain, value))


def _plain(value: Any) -> Any:
    return plain_full_tensor(value, value.device_mesh) if isinstance(value, DTensor) else value
