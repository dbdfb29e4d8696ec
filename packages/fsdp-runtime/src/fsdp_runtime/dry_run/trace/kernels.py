"""Kernels of an accelerator: costs of operators, and stand-ins for code that holds far more on a CPU.

Operations are counted by torch's formulas, and by our own formulas for operators that torch lacks.

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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from inspect import signature, unwrap
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import CausalBias
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fsdp_runtime._torch_compat import storage_key, tree_leaves, varlen_operators
from fsdp_runtime.dry_run.types import Assumption
from fsdp_runtime.steps.documents.recurrences import RECURRENCES, Recurrence, functions_called
from fsdp_runtime.swaps import swapped

aten = torch.ops.aten

#: The kernels of attention: FlashAttention 2 (also torch's own), FlashAttention 3, or none counted.
AttentionKernels = Literal["flash2", "flash3", "none"]

_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}
_FLOAT32 = 4
_ROWS = 128  # rows of a tile, to which both kernels round lengths up


def workspace_of(function: Any, args: Any, kernels: AttentionKernels) -> int:
    """Return the bytes that backward of attention or of an embedding allocates besides its results; 0 for others."""
    if function is aten.embedding_dense_backward.default:
        # Float32 sums of at most ten rows of one token (``EmbeddingBackwardKernel.cu``).
        gradient, tokens, rows = args[0], args[1].numel(), args[2]
        return int((tokens // 10 + min(tokens, rows)) * gradient.shape[-1] * _FLOAT32)
    # Both kernels add up the gradient of queries in float32, with one number a row for the softmax. Where several query
    # heads share a key head, FlashAttention 2 computes gradients of keys and values for every query head, and
    # FlashAttention 3 adds them up in float32 (``flash_api.cpp`` of each).
    of_segments = function.overloadpacket is varlen_operators()[1]
    if kernels == "none" or (function not in _BACKWARD and not of_segments):
        return 0
    _, query, key, value = args[:4]
    if of_segments:  # ``[tokens, heads, dim]``
        query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    batch, heads, tokens, dim = query.shape
    tokens, dim = -(-tokens // _ROWS) * _ROWS, -(-dim // 32) * 32
    nbytes: int = batch * heads * tokens * (dim + 1) * _FLOAT32
    if heads != key.shape[1]:
        if kernels == "flash2":
            nbytes += (key.numel() + value.numel()) // key.shape[1] * heads * key.element_size()
        else:
            nbytes += (key.numel() + value.numel()) * _FLOAT32
    return nbytes


def flops_of(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the operations of one call, a multiply-add counted as two; 0 for operators that only copy or add."""
    # Causal attention counts as full attention, as in ``torch.utils.flop_counter``.
    packet = function.overloadpacket
    if packet in varlen_operators():
        return varlen_flops(packet, args)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*_of_query_heads(*args[:3])))  # type: ignore[no-untyped-call]
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(args[0].shape, *_of_query_heads(*args[1:4])))  # type: ignore[no-untyped-call]
    if "grouped_mm" in _name_of(packet) and getattr(args[0], "ndim", 0) == 2:
        products = 2 if "backward" in _name_of(packet) else 1  # transformers' operator computes both gradients
        return 2 * products * int(args[0].numel() * args[1].shape[-1])
    if packet is torch.ops.aten._scaled_mm_v2:  # torch counts the first version only
        return 2 * int(args[0].numel() * args[1].shape[-1])
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def varlen_flops(packet: Any, args: Any) -> int:
    """Return the operations of attention over segments, as if each were as long as the longest."""
    # Segments of a dry run are rows, or a chunk of each row. torch's formula reads the lengths, which are data there. A
    # window's scores are counted twice: the caller halves all counts for the masked part of a causal mask.
    backward = packet is varlen_operators()[1]
    query, value = (args[1], args[3]) if backward else (args[0], args[2])
    before, (queries, keys) = (args[6], args[8:10]) if backward else (args[3], args[5:7])
    window = args[13] if backward else args[9]
    seen = min(keys, 2 * (window[0] + 1)) if window and window[0] >= 0 else keys
    pairs = (len(before) - 1) * min(queries, len(query)) * seen * query.shape[1]
    width, of_values = query.shape[-1], value.shape[-1]
    return int(2 * pairs * (3 * width + 2 * of_values if backward else width + of_values))


def kind_of(function: Any) -> str:
    """Return the kind of an operator's operations: ``"attention"``, ``"grouped"``, ``"float8"`` or ``"matmul"``."""
    name = _name_of(function.overloadpacket)
    if "attention" in name or "varlen_attn" in name:
        return "attention"
    return "grouped" if "grouped_mm" in name else "float8" if "scaled_mm" in name else "matmul"


@cache  # torch builds the text at each call
def _name_of(packet: Any) -> str:
    return str(packet)


def bytes_moved(args: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes at least, 0 for views."""
    read = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    known = {storage_key(leaf) for leaf in read}
    if all(storage_key(leaf) in known for leaf in written):
        return 0
    return sum(leaf.nbytes for leaf in (*read, *written))


def _of_query_heads(query: Tensor, key: Tensor, value: Tensor) -> list[torch.Size]:
    """Return the shapes with as many key/value heads as query heads: torch 2.11's formulas need equal numbers."""
    return [torch.Size((tensor.shape[0], query.shape[1], *tensor.shape[2:])) for tensor in (query, key, value)]


#: The memory-efficient kernel takes multiples of this number of features per head.
_ALIGNED = 8


def kernels_of_attention() -> AbstractContextManager[None]:
    """Let attention run the memory-efficient kernel where an accelerator would call it and a CPU has none."""
    varlen_operators()  # loaded before tensors are fake
    # A mode for functions of torch would not reach recomputation: ``Tensor.backward`` leaves it.
    original: Any = functional.scaled_dot_product_attention

    @wraps(original)
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        output = _efficient(*args, **kwargs)
        return original(*args, **kwargs) if output is None else output

    return swapped(functional, scaled_dot_product_attention=attend)


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
    with ExitStack() as stack:
        for module, name in sorted(_used(model)):
            python_module = sys.modules[module]
            stand_in = _in_place_of(name, getattr(python_module, name))
            stack.enter_context(swapped(python_module, **{name: stand_in}))
        yield


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
