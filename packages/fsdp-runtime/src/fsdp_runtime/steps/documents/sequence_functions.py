"""The functions by which transformers' token mixers mix tokens: short convolutions and recurrences.

Since transformers 5.23 the modules of linear attention, Mamba and short convolutions compute everything else token by
token, and call these functions by a name of their Python module.  So a copy of a forward can find other functions
under these names and mix tokens by them; the class and its Python module do not change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, getclosurevars, isfunction, signature, unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsdp_runtime._transformers_compat.models import CACHES
from fsdp_runtime.errors import LayoutError
from fsdp_runtime.steps.documents.documents import Documents
from fsdp_runtime.steps.documents.isolation import BOUNDARIES, run_per_document

#: A causal convolution of ``[batch, features, seq]`` with few taps.
CONVOLUTION = "causal_conv1d_fn"
#: A fused kernel of several steps.  If it returns ``None``, a module calls the functions above one by one.
FUSED = "mamba2_split_conv1d_scan_combined"
#: The arguments of a recurrence that need a state.
_STATES = ("initial_state", "initial_states", "output_final_state", "return_final_states", "return_last_state")
#: The arguments of a forward that may be split by tokens.
_TAKEN = {"self", "hidden_states", "attention_mask", *CACHES}


@dataclass(frozen=True)
class Recurrence:
    """The arguments of a recurrence that has no connection between heads, by name."""

    heads: tuple[str, ...]  # ``[batch, seq, heads, *]``; the first has the output's shape
    groups: tuple[str, ...] = ()  # ``[batch, seq, groups, *]``: neighbouring heads share each
    common: tuple[str, ...] = ()  # ``[batch, seq, *]`` for all heads
    parameters: tuple[str, ...] = ()  # ``[heads, *]``
    tokens_last: bool = False  # ``[batch, heads or features, seq]`` instead
    boundaries: str = "seq_idx"  # the argument that kernels take for documents
    returns_state: bool = False  # a tuple of the output and a final state

    @property
    def of_tokens(self) -> tuple[str, ...]:
        """The names of all tensors of tokens."""
        return (*self.heads, *self.groups, *self.common)

    def result(self, output: Tensor) -> Any:
        """Return an output ``[batch, seq, heads, *]`` as transformers' function returns it."""
        if self.tokens_last:
            return output.transpose(1, 2)
        return (output, None) if self.returns_state else output


#: By name: a chunked delta rule, Kimi's, the scan of Mamba 2, and the scan of Mamba 1 with channels as heads.
RECURRENCES: Mapping[str, Recurrence] = {
    "torch_chunk_gated_delta_rule": Recurrence(
        ("value", "g", "beta"), groups=("query", "key"), boundaries="cu_seqlens", returns_state=True
    ),
    "chunk_kimi_delta_attention": Recurrence(
        ("value", "query", "key", "g", "beta"), boundaries="cu_seqlens", returns_state=True
    ),
    "mamba2_chunk_scan": Recurrence(
        ("hidden_states", "dt", "z"), groups=("B", "C"), parameters=("A", "D", "dt_bias")
    ),
    "mamba_selective_scan": Recurrence(
        ("hidden_states", "dt", "z"), common=("B", "C"), parameters=("A", "D", "delta_bias"), tokens_last=True
    ),
}  # fmt: skip


@cache
def functions_called(cls: type) -> tuple[str, ...]:
    """Return the names of the functions by which a class mixes tokens; none if its forward may mix them otherwise."""
    forward = unwrap(cls.forward)  # type: ignore[attr-defined]
    if not isfunction(forward) or not cls.__module__.startswith("transformers."):
        return ()
    takes = signature(forward).parameters.values()
    if {parameter.name for parameter in takes if parameter.kind is not Parameter.VAR_KEYWORD} - _TAKEN:
        return ()
    known = {CONVOLUTION, FUSED, *RECURRENCES}
    others = {name for value in vars(cls).values() if isfunction(value) for name in unwrap(value).__code__.co_names}
    called = known & set(forward.__code__.co_names) & forward.__globals__.keys()
    if known & others - called or not called - {FUSED}:  # some are called by another method
        return ()
    return tuple(sorted(called))


def with_functions(
    cls: type,
    convolution: Callable[..., Any],
    recurrence: Callable[[Callable[..., Any], Recurrence, Call], Tensor],
    fused: Callable[..., Any] = lambda *_, **__: None,  # the module then calls the steps of a fused kernel one by one
) -> Callable[..., Any]:
    """Return a copy of a class's forward that calls other functions by the same names, given the replaced one."""
    others = {CONVOLUTION: convolution, FUSED: fused}
    functions = {name: _in_place_of(cls, name, others.get(name, recurrence)) for name in functions_called(cls)}
    forward = unwrap(cls.forward)  # type: ignore[attr-defined]
    copied = FunctionType(
        forward.__code__, {**forward.__globals__, **functions}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    copied.__kwdefaults__ = forward.__kwdefaults__
    # Lengths of documents differ from batch to batch.
    uncompiled: Callable[..., Any] = torch.compiler.disable(copied)  # type: ignore[no-untyped-call]
    return uncompiled


def _in_place_of(cls: type, name: str, other: Callable[..., Any]) -> Callable[..., Any]:
    recurrence = RECURRENCES.get(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        function = getattr(sys.modules[unwrap(cls.forward).__module__], name)  # type: ignore[attr-defined]
        if recurrence is None:
            return other(function, *args, **kwargs)
        return recurrence.result(other(function, recurrence, Call.of(function, recurrence, args, kwargs)))

    return call


@cache
def takes_boundaries(function: Callable[..., Any], name: str) -> bool:
    """Return True where a kernel is installed that takes the boundaries of documents."""
    # transformers wraps the kernel or its own function, which ignores or refuses boundaries, in a function that has the
    # used function as a variable.
    kernel = getclosurevars(function).nonlocals.get("implementation", function) if isfunction(function) else function
    return name in signature(kernel).parameters


@dataclass(frozen=True)
class Call:
    """A call of a recurrence."""

    tokens: dict[str, Tensor]  # ``[batch, seq, *]`` by name
    further: dict[str, Any]  # the other arguments by name
    places: tuple[str, ...]  # names of arguments by place; a kernel has its own names

    @classmethod
    def of(
        cls, function: Callable[..., Any], recurrence: Recurrence, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Call:
        """Read the arguments of a call without an initial or a returned state."""
        places = tuple(signature(function).parameters)[: len(args)]
        named = {**dict(zip(places, args, strict=True)), **kwargs}
        for name in _STATES:
            if named.get(name) is not None and named[name] is not False:
                raise LayoutError(f"{name} of a recurrence has no boundaries of documents: pass use_cache=False")
        tokens = {name: named.pop(name) for name in recurrence.of_tokens if named.get(name) is not None}
        if recurrence.tokens_last:
            tokens = {name: value.transpose(1, 2) for name, value in tokens.items()}
        further = {name: value for name, value in named.items() if name not in (*BOUNDARIES, "cu_seqlens")}
        return cls(tokens, further, places)


def convolve_documents(
    function: Callable[..., Tensor],
    tokens: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    numbers: Tensor,
) -> Tensor:
    """Convolve without reading another document: by a kernel that takes ``seq_idx``, or tap by tap."""
    # Tokens are ``[batch, features, seq]``, the weight ``[features, taps]``, the documents' numbers ``[batch, seq]``.
    if takes_boundaries(function, "seq_idx"):
        return function(tokens, weight, bias, activation=activation, seq_idx=numbers.to(torch.int32).contiguous())
    length, taps = tokens.shape[2], weight.shape[1]
    source = tokens.to(weight.dtype)
    output = source * weight[:, taps - 1, None]
    for back in range(1, min(taps, length)):
        same = pad(numbers[:, :-back] == numbers[:, back:], (back, 0))
        output = output + pad(source[:, :, :-back], (back, 0)) * (weight[:, taps - 1 - back, None] * same[:, None])
    if bias is not None:
        output = output + bias[:, None]
    if activation is not None:
        from transformers.activations import ACT2FN

        output = ACT2FN[activation](output)
    return output.to(tokens.dtype)


def recur(function: Callable[..., Any], recurrence: Recurrence, call: Call, documents: Documents | None) -> Tensor:
    """Call a recurrence that restarts in each document; return ``[batch, seq, heads, *]``."""
    boundaries: dict[str, Tensor] = {}

    def run(**tokens: Tensor) -> Tensor:
        layout = {name: value.transpose(1, 2) if recurrence.tokens_last else value for name, value in tokens.items()}
        named = {**call.further, **layout, **boundaries}
        by_place = [named.pop(name) for name in call.places]
        result = function(*by_place, **named)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output.transpose(1, 2) if recurrence.tokens_last else output

    if documents is None or not documents.packed:
        return run(**call.tokens)
    if not takes_boundaries(function, recurrence.boundaries):
        return run_per_document(run, (), call.tokens, documents, singly=False)  # type: ignore[no-any-return]
    if recurrence.boundaries == "seq_idx":
        boundaries["seq_idx"] = documents.numbers.to(torch.int32).contiguous()
        return run(**call.tokens)
    boundaries["cu_seqlens"] = documents.cumulative_lengths
    one_row = {name: value.flatten(0, 1).unsqueeze(0) for name, value in call.tokens.items()}
    return torch.unflatten(run(**one_row).squeeze(0), 0, documents.begins.shape)
