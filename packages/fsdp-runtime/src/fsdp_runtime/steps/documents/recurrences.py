"""Convolutions and recurrences on packed rows, by other functions in the place of transformers' own.

Since transformers 5.23 the modules of linear attention, Mamba and short convolutions compute everything else token by
token, and call these functions by a name of their Python module.  So a copy of a forward can find other functions
under these names and mix tokens by them; the class and its Python module do not change.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, getclosurevars, isfunction, signature, unwrap
from types import FunctionType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from fsdp_runtime._torch_compat import has_values
from fsdp_runtime._transformers_compat.models import CACHES
from fsdp_runtime.errors import LayoutError
from fsdp_runtime.model.token_mixers import TokenMixer, has_inner_mixer
from fsdp_runtime.steps.documents.documents import Documents
from fsdp_runtime.steps.documents.isolation import BOUNDARIES, CurrentDocuments, run_per_document
from fsdp_runtime.steps.recomputation import unrecorded
from fsdp_runtime.wrap import Wrapper, wrap

logger = logging.getLogger(__name__)

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


#: The places to which tokens are moved to test a module.
_MOVED = (5, 2, 7, 0, 3, 6, 1, 4)
#: The error, relative to the largest output, that rounding may leave.
_TOLERANCE = 0.02


class ByFunctions(Wrapper):
    """Replaces the functions by which a token mixer mixes tokens."""

    of_single_tokens: ClassVar[Callable[..., Any]]
    verified: ClassVar[bool | None] = None

    def takes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True for several plain tokens, if the module is known to mix them by these functions only."""
        # A single token has another shape.  A DTensor holds the tokens of all ranks of tp, not this rank's.
        tokens = args[0] if args else kwargs.get("hidden_states")
        plain = isinstance(tokens, Tensor) and not isinstance(tokens, DTensor) and tokens.shape[1] > 1
        return plain and self.is_verified(tokens)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def is_verified(self, tokens: Tensor) -> bool:
        """Test once that without convolution and recurrence the module computes each token alone."""
        cls = type(self)
        if cls.verified is None:
            with unrecorded():
                token_wise = _is_token_wise(lambda each: cls.of_single_tokens(self, each), tokens)
            if token_wise is None:
                return True
            owner: Any = next(base for base in cls.__mro__ if "of_single_tokens" in vars(base))
            owner.verified = token_wise
            if not token_wise:
                logger.warning("%s mixes tokens by more than its convolution and recurrence", cls.__name__)
        return bool(cls.verified)


class PackedRows(ByFunctions):
    """Runs a token mixer on packed rows, before the wrapper that runs it per document."""

    effect = "packed rows by functions"
    documents: ClassVar[CurrentDocuments]
    of_rows: ClassVar[Callable[..., Any]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute rows of several documents, or single documents where rows are not verified."""
        documents = self.documents.current
        if documents is None or not documents.packed or not self.takes(args, kwargs):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return type(self).of_rows(self, *args, **{n: value for n, value in kwargs.items() if n not in BOUNDARIES})


def mixes_by_functions(mixer: TokenMixer) -> bool:
    """Return True for a mixer that calls known functions, and has no other mixer inside."""
    return mixer.isolation == "documents" and bool(functions_called(mixer.cls)) and not has_inner_mixer(mixer.module)


def mix_in(
    mixers: Iterable[TokenMixer], mixin: type[ByFunctions], attributes: Callable[[type], dict[str, Any]]
) -> None:
    """Put a wrapper in front of all mixers that call known functions, with attributes of each class."""
    by_class: dict[type, list[nn.Module]] = {}
    for mixer in filter(mixes_by_functions, mixers):
        by_class.setdefault(mixer.cls, []).append(mixer.module)
    for cls, modules in by_class.items():
        of_single_tokens = with_functions(cls, lambda _, hidden_states, *__, **___: hidden_states, _token_by_token)
        wrap(modules, mixin, of_single_tokens=of_single_tokens, **attributes(cls))


def compute_rows(mixers: Iterable[TokenMixer], documents: CurrentDocuments) -> None:
    """Let the mixers that call known functions compute rows of several documents, before :class:`PackedMixer`."""
    mix_in(mixers, PackedRows, lambda cls: {"documents": documents, "of_rows": _forward_on_packed_rows(cls, documents)})


def _forward_on_packed_rows(cls: type, documents: CurrentDocuments) -> Callable[..., Any]:
    def numbers() -> Tensor:
        return cast(Documents, documents.current).numbers

    def convolve(
        function: Any, hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **_: Any
    ) -> Tensor:
        return convolve_documents(function, hidden_states, weight, bias, activation, numbers())

    def recur_in_rows(function: Any, recurrence: Recurrence, call: Call) -> Tensor:
        return recur(function, recurrence, call, documents.current)

    def fused(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not takes_boundaries(function, "seq_idx"):
            return None
        return function(*args, **{**kwargs, "seq_idx": numbers().to(torch.int32).contiguous()})

    return with_functions(cls, convolve, recur_in_rows, fused)


def _token_by_token(_: Any, recurrence: Recurrence, call: Call) -> Tensor:
    """Return a token-wise function of all inputs of a recurrence."""
    output = call.tokens[recurrence.heads[0]]
    for value in call.tokens.values():
        mean = value.flatten(2).mean(2)
        output = output + mean.view(*mean.shape, *(1,) * (output.dim() - 2)).to(output.dtype)
    return output


@torch.no_grad()
def _is_token_wise(forward: Callable[[Tensor], Any], like: Tensor) -> bool | None:
    """Return True if the output of a token depends neither on its place nor on other tokens; ``None`` without data."""
    # Half of the tokens are moved to other places among others, then the other half. Waits for the device.
    values = torch.arange(2 * len(_MOVED) * like.shape[2], device=like.device).view(2, 1, len(_MOVED), -1)
    if not has_values(values):  # also where ``like`` is a DTensor of fake ones
        return None
    tokens, others = torch.sin(values * 1.7).to(like.dtype)
    moved = torch.tensor(_MOVED, device=like.device)
    expected = _full(forward(tokens))[:, moved]
    bound = _TOLERANCE * expected.abs().max()
    for half in (0, 1):
        tested = moved % 2 == half
        outputs = _full(forward(torch.where(tested[:, None], tokens[:, moved], others)))
        if not bool((outputs - expected)[:, tested].abs().max() <= bound):
            return False
    return True


def _full(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first.full_tensor() if isinstance(first, DTensor) else first
