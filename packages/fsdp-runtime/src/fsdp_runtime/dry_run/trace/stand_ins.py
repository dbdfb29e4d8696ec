"""Attention and recurrences as kernels of an accelerator compute them, in place of code that holds far more on a CPU.

``scaled_dot_product_attention`` holds no scores on CUDA where values are narrower than queries, as in latent
attention, or where weights are dropped: its memory-efficient kernel and cuDNN's take both.  On a CPU it computes
products and a softmax of all scores.

transformers' code in torch of linear attention and state spaces loops over tokens or chunks and keeps every state, so
its trace takes minutes and its memory differs from a run with flash-linear-attention and mamba-ssm.  The kernels keep
their inputs and a few numbers a token, write states of whole chunks, and compute these again in backward.
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
from torch.nn import functional
from torch.nn.attention.bias import CausalBias

from fsdp_runtime._torch_compat import varlen_operators
from fsdp_runtime.dry_run.types import Assumption
from fsdp_runtime.steps.documents.sequence_functions import RECURRENCES, Recurrence, functions_called

#: The memory-efficient kernel takes multiples of this number of features per head.
_ALIGNED = 8


@contextmanager
def kernels_of_attention() -> Iterator[None]:
    """Let attention run the memory-efficient kernel where an accelerator would call it and a CPU has none."""
    varlen_operators()  # loaded before tensors are fake
    # A mode for functions of torch would not reach recomputation: ``Tensor.backward`` leaves it.
    original: Any = functional.scaled_dot_product_attention

    @wraps(original)
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        output = _efficient(*args, **kwargs)
        return original(*args, **kwargs) if output is None else output

    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return attention of the memory-efficient kernel, ``None`` if torch's choice is the same on a CPU."""
    widths = query.shape[-1], value.shape[-1]
    is_taken = query.ndim == 4 and not enable_gqa and not any(width % _ALIGNED for width in widths)
    if not is_taken or (widths[0] == widths[1] and not dropout_p):
        return None
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = None, True  # it holds no mask there
    elif attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    with_gradients = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    output: Tensor = kernel(query, key, value, attn_mask, with_gradients, dropout_p, is_causal, scale=scale)[0]
    return output


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
