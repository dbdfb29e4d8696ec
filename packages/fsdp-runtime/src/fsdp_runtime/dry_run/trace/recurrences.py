"""Linear attention and state spaces as kernels compute them, in place of transformers' code in torch.

That code loops over tokens or chunks and keeps every state, so its trace takes minutes and its memory differs from a
run with flash-linear-attention and mamba-ssm.  The kernels keep their inputs and a few numbers a token, write states of
whole chunks, and compute these again in backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime.dry_run.types import Assumption
from fsdp_runtime.steps.documents.sequence_functions import RECURRENCES, Recurrence, functions_called


@dataclass(frozen=True)
class _KernelCosts:
    """The allocations of a kernel."""

    chunk: int  # tokens of one state
    key: str  # the argument with a state's rows as features
    state_dtype: torch.dtype | None = torch.float32  # of states; ``None`` for the output's dtype
    transforms: bool = False  # solves a triangular system of each chunk, and keeps it and normalized queries and keys


#: flash-linear-attention 0.4 (``chunk_gated_delta_rule``, ``chunk_kda``) and mamba-ssm 2.2 (``ssd_combined``,
#: ``selective_scan``).
_KERNELS: Mapping[str, _KernelCosts] = {
    "torch_chunk_gated_delta_rule": _KernelCosts(64, "key", None, transforms=True),
    "chunk_kimi_delta_attention": _KernelCosts(64, "key", None, transforms=True),
    "mamba2_chunk_scan": _KernelCosts(256, "B"),
    "mamba_selective_scan": _KernelCosts(2048, "B"),
}


@contextmanager
def kernels_of_recurrences(model: nn.Module) -> Iterator[None]:
    """Let the modules of a model call recurrences that allocate as kernels do; their values are unused."""
    replaced: list[tuple[Any, str, Any]] = []
    for module, name in sorted(_used(model)):
        python_module = sys.modules[module]
        original = getattr(python_module, name)
        replaced.append((python_module, name, original))
        setattr(python_module, name, _in_place_of(name, original))
    try:
        yield
    finally:
        for python_module, name, original in replaced:
            setattr(python_module, name, original)


def recurrence_assumptions(model: nn.Module) -> list[Assumption]:
    """Return the assumption that kernels run the recurrences of a model."""
    names = ", ".join(dict.fromkeys(name for _, name in sorted(_used(model))))
    if not names:
        return []
    text = (
        f"{names}: counted as the kernels of flash-linear-attention or mamba-ssm allocate; transformers' code in "
        "torch, which runs without them, keeps far more"
    )
    return [Assumption(operator="", module="", assumption=text)]


def _used(model: nn.Module) -> set[tuple[str, str]]:
    """Return the Python modules and names of the recurrences that a model's modules call."""
    classes: set[Any] = {type(module) for module in model.modules()}
    return {
        (unwrap(cls.forward).__module__, name) for cls in classes for name in functions_called(cls) if name in _KERNELS
    }


def _in_place_of(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in of a recurrence, with its signature."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature(original).bind(*args, **kwargs)
        arguments = {**given.arguments, **given.arguments.get("kwargs", {})}
        recurrence = RECURRENCES[name]
        tokens = {each: arguments[each] for each in recurrence.of_tokens if isinstance(arguments.get(each), Tensor)}
        parameters = [arguments[each] for each in recurrence.parameters if isinstance(arguments.get(each), Tensor)]
        output = _KernelCall.apply(name, tuple(tokens), *tokens.values(), *parameters)  # type: ignore[no-untyped-call]
        return recurrence.result(output.transpose(1, 2) if recurrence.tokens_last else output)

    return call


class _KernelCall(torch.autograd.Function):
    """Allocate a kernel's result, saved tensors, and temporaries."""

    @staticmethod
    def forward(context: Any, name: str, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
        kernel, recurrence = _KERNELS[name], RECURRENCES[name]
        value, key = tensors[0], tensors[names.index(kernel.key)]
        kept: list[Tensor] = []
        if kernel.transforms:
            batch, tokens, heads = value.shape[:3]
            kept += [torch.empty_like(key), torch.empty_like(key)]
            kept.append(value.new_empty(batch, tokens, heads, kernel.chunk))
            kept.append(value.new_empty(batch, tokens, heads, dtype=torch.float32))
        temporaries = _states(kernel, recurrence, value, key)
        output = torch.empty_like(value)
        context.name, context.names = name, names
        context.save_for_backward(*tensors, *kept)
        context.inputs = len(tensors)
        del temporaries
        return output

    @staticmethod
    def backward(context: Any, _gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors = context.saved_tensors[: context.inputs]
        kernel, recurrence = _KERNELS[context.name], RECURRENCES[context.name]
        value, key = tensors[0], tensors[context.names.index(kernel.key)]
        states = [_states(kernel, recurrence, value, key) for _ in range(2)]  # states, and their gradients
        gradients = tuple(
            torch.empty_like(each) if needed else None
            for each, needed in zip(tensors, context.needs_input_grad[2:], strict=True)
        )
        del states
        return None, None, *gradients


def _states(kernel: _KernelCosts, recurrence: Recurrence, value: Tensor, key: Tensor) -> list[Tensor]:
    """Return the states of all chunks, and for ``transforms`` rows of keys and values that represent products."""
    if recurrence.tokens_last:
        batch, features, tokens = value.shape
        return [value.new_empty(batch, features, -(-tokens // kernel.chunk), 2 * key.shape[1], dtype=torch.float32)]
    batch, tokens, heads, width = value.shape
    rows = key.shape[-1]
    chunks = -(-tokens // kernel.chunk)
    states = value.new_empty(batch, chunks, heads, rows, width, dtype=kernel.state_dtype or value.dtype)
    keys = value.new_empty(batch * heads, tokens, rows)
    return [states, keys, *(torch.bmm(keys, value.new_empty(batch * heads, rows, width)) for _ in range(2))]
