"""Convolutions and recurrences on packed rows, by replacing the functions that they call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import has_values
from fsdp_runtime.model.token_mixers import TokenMixer, has_inner_mixer
from fsdp_runtime.steps.documents.documents import Documents
from fsdp_runtime.steps.documents.isolation import BOUNDARIES, CurrentDocuments
from fsdp_runtime.steps.documents.sequence_functions import (
    Call,
    Recurrence,
    convolve_documents,
    functions_called,
    recur,
    takes_boundaries,
    with_functions,
)
from fsdp_runtime.steps.recomputation import unrecorded
from fsdp_runtime.wrap import Wrapper, wrap

logger = logging.getLogger(__name__)

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
        wrap(modules, mixin, of_single_tokens=_forward_without_mixing(cls), **attributes(cls))


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


def _forward_without_mixing(cls: type) -> Callable[..., Any]:
    """Return a forward in which convolution and recurrence are replaced by functions of single tokens."""
    return with_functions(cls, lambda _, hidden_states, *__, **___: hidden_states, _token_by_token)


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
