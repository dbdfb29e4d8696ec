"""Hidden states of all depths, as ``output_hidden_states=True`` asks for them, under sequence parallelism.

Between blocks they are DTensors that are sharded on the sequence, which a plain layer cannot read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.wrap import hook_forward
from tp_plans.runtime import plain_full_tensor


def return_full_hidden_states(model: nn.Module) -> None:
    """Let every transformers model in a model return full plain tensors in its tuples of hidden states."""
    for module in model.modules():
        if is_transformers_model(module):
            hook_forward(module, "gathers hidden states", after=_with_full_tuples)


def _with_full_tuples(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Gather the members of an output's tuples: hidden states come with one entry a block.

    Logits and the last hidden state, which have layouts of their own, are no members of tuples.
    """
    if isinstance(output, Mapping):  # a ModelOutput, which keeps attributes and entries in step
        for name, value in output.items():
            output[name] = _full(value)  # type: ignore[index]
        return output
    return tuple(map(_full, output)) if type(output) is tuple else output


def _full(value: Any) -> Any:
    if type(value) is not tuple or not any(isinstance(each, DTensor) for each in value):
        return value
    return tuple(plain_full_tensor(each, each.device_mesh) if isinstance(each, DTensor) else each for each in value)
