"""Token mixers other than plain attention, under context parallelism.

Known convolutions and recurrences run on local tokens (``OwnTokens``), and so do their projections, norms and gates.  A
convolution gets the few tokens before each chunk from the ranks that have them (a halo), and a recurrence runs on its
share of the heads over all tokens, between two all-to-alls.

Any other mixer runs on the full sequence on every rank: its input is gathered over ``cp``, the mixer runs on all
tokens, and each rank keeps the outputs of its tokens.  This is exact for any mixer, at the compute and memory of a run
without ``cp``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import pad

from fsdp_runtime.errors import LayoutError
from fsdp_runtime.model.token_mixers import Isolation, TokenMixer, has_inner_mixer
from fsdp_runtime.steps.context.attention import ContextAttention
from fsdp_runtime.steps.context.exchange import (
    gather_features,
    gather_tokens,
    heads_to_tokens,
    preceding_tokens,
    tokens_to_heads,
)
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.context.sharding import SequenceLayout, padded
from fsdp_runtime.steps.documents.documents import Documents
from fsdp_runtime.steps.documents.isolation import (
    BOUNDARIES,
    is_padding_mask,
    map_arguments,
    map_full,
    map_tensors,
    mask_argument,
    restricted,
    run_per_document,
    uses_interface,
)
from fsdp_runtime.steps.documents.recurrences import (
    ByFunctions,
    Call,
    Recurrence,
    convolve_documents,
    mix_in,
    recur,
    with_functions,
)
from fsdp_runtime.wrap import Wrapper, wrap


def gathered_mixers(mixers: Sequence[TokenMixer], implementation: str) -> tuple[TokenMixer, ...]:
    """Return the token mixers that run on the full sequence: all but attention that ``ContextAttention`` replaces."""
    # A layer without an indexer may use the keys that the indexer of another layer has picked.
    indexed = {type(mixer.module) for mixer in mixers if has_inner_mixer(mixer.module)}
    return tuple(m for m in mixers if type(m.module) in indexed or not _is_replaced(m, implementation))


def replaced_attention(mixers: Sequence[TokenMixer], implementation: str) -> tuple[TokenMixer, ...]:
    """Return the token mixers that ``ContextAttention`` computes: all that do not run on the full sequence."""
    gathered = {mixer.path for mixer in gathered_mixers(mixers, implementation)}
    return tuple(mixer for mixer in mixers if mixer.path not in gathered)


def _is_replaced(mixer: TokenMixer, implementation: str) -> bool:
    """Return True for attention that passes all its inputs to ``transformers.AttentionInterface``."""
    cls: Any = type(mixer.module)
    if mixer.isolation != "mask" or not uses_interface(cls):
        return False
    makes_masks = hasattr(mixer.module, "prepare_dynamic_mask")  # from the values of all tokens
    return not makes_masks and (implementation == "sdpa" or eager_function(cls) is not None)


def eager_function(cls: type) -> Any:
    """Return the eager attention of a class's Python module, ``None`` if it has none."""
    return getattr(sys.modules[cls.__module__], "eager_attention_forward", None)


def gather_for(mixers: Collection[TokenMixer], attention: ContextAttention) -> tuple[nn.Module, ...]:
    """Make token mixers run on the full sequence, before tensor parallelism; return all modules inside of them."""
    for isolation in get_args(Isolation):
        modules = [mixer.module for mixer in mixers if mixer.isolation == isolation]
        wrap(modules, _GatheredMixer, cp_attention=attention, isolation=isolation)
    convolve, recurrence = partial(_convolve, attention), partial(_recur_by_heads, attention)
    mix_in(
        mixers,
        OwnTokens,
        lambda cls: {"cp_attention": attention, "of_own_tokens": with_functions(cls, convolve, recurrence)},
    )
    return tuple(inner for mixer in mixers for inner in mixer.module.modules())


class _GatheredMixer(Wrapper):
    """Gathers tokens inside of tensor parallelism: its rules see this rank's tokens."""

    effect = "full sequence of cp"
    cp_attention: ClassVar[ContextAttention]
    isolation: ClassVar[Isolation]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attention, forward = self.cp_attention, super().forward  # type: ignore[misc]
        if attention.whole_rows:
            return forward(*args, **kwargs)
        tokens = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor) and arg.dim() > 1), None)
        if tokens is None:
            raise LayoutError(f"{type(self).__name__} takes no tensor [batch, seq / cp, ...]")
        layout = attention.layout(tokens.shape[1])
        full = _Full(attention, layout, type(self).__name__, rows=tokens.shape[0])
        inputs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        args, inputs = map_arguments(self, args, inputs, full.of)  # type: ignore[arg-type]  # a mixin of modules
        documents = attention.documents.current
        if self.isolation == "mask":
            args, inputs = _masked(self, args, inputs, documents, layout.length)
        elif documents is not None:
            output = run_per_document(forward, args, inputs, documents, singly=self.isolation == "singles")
            return _own(output, layout)
        return _own(forward(*args, **inputs), layout)


class _Full:
    """The arguments of a mixer with all tokens."""

    def __init__(self, attention: ContextAttention, layout: SequenceLayout, mixer: str, *, rows: int) -> None:
        self.attention, self.layout, self.mixer, self.rows = attention, layout, mixer, rows
        self.local = layout.length // layout.ranks

    def of(self, name: str, value: Any) -> Any:
        """Return an argument with all tokens instead of this rank's tokens in every tensor."""
        # The padding mask of full rows replaces a padding mask: a model may have cut its mask to this rank's tokens.
        if isinstance(value, SequenceMask):
            return value.full
        return map_tensors(
            value, lambda tensor: self.attention.padding if is_padding_mask(name, tensor) else self._of_tensor(tensor)
        )

    def _of_tensor(self, value: Tensor) -> Tensor:
        if isinstance(value, DTensor):  # over tp
            replicated = [Replicate()] * value.device_mesh.ndim
            local = self._of_tensor(value.redistribute(placements=replicated).to_local())
            return DTensor.from_local(local, value.device_mesh, replicated, run_check=False)
        if value.dim() == 4 and value.shape[2:] == (self.local, self.layout.length):  # rows of a mask
            return self.attention.full_mask(value, self.layout)
        if value.shape == (self.local, self.local) and not value.is_floating_point() and self.layout.ranks > 1:
            if torch.equal(value, _distances(self.local, value)):  # no positions, which are not negative
                return _distances(self.layout.length, value)
            if self.local != self.rows:
                raise LayoutError(
                    f"{self.mixer} is given numbers {tuple(value.shape)}, one for each pair of this rank's tokens, "
                    "which the model makes from the length of a row: use cp=1"
                )
        dim = next((dim for dim in (1, 2) if value.dim() > dim and value.shape[dim] == self.local), None)
        if dim is None:
            return value
        if not value.is_floating_point():
            return gather_tokens(value, self.layout, self.attention.group, dim=dim)
        (gathered,) = gather_features([value.movedim(dim, 1)], self.layout, self.attention.group)
        return gathered.movedim(1, dim).contiguous()


def _distances(length: int, like: Tensor) -> Tensor:
    """Return the distance between each pair of tokens of a row, ``[length, length]``."""
    places = torch.arange(length, device=like.device, dtype=like.dtype)
    return places[:, None] - places


def _masked(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], documents: Documents | None, length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an attention with a mask of the full sequence that isolates documents."""
    mask, _ = mask_argument(module, args, kwargs)
    of_pairs = isinstance(mask, Tensor) and mask.dim() == 4
    if of_pairs and mask.shape[2:] not in ((length, length), (1, length)):
        raise LayoutError(
            f"{type(module).__name__} has a mask {tuple(mask.shape)}, and the full sequence {length} tokens: the model "
            "makes its masks itself, from the tokens of one rank; use cp=1"
        )
    if documents is None or (of_pairs and mask.shape[2] == length):  # from ContextAttention.mask
        return args, kwargs
    return restricted(module, args, kwargs, documents)


def _own(output: Any, layout: SequenceLayout) -> Any:
    """Return the outputs of this rank's tokens; ``None`` for attention weights, and parameters unchanged."""
    if isinstance(output, nn.Parameter):  # a bias that the block adds
        return output
    if isinstance(output, DTensor):
        return map_full(lambda full: _own(full, layout), output)
    if isinstance(output, Tensor):
        if output.dim() < 2 or output.shape[1] != layout.length:
            return None
        return output.index_select(1, layout.positions.to(output.device))
    if type(output) in (tuple, list):
        return type(output)(_own(each, layout) for each in output)
    return output


class OwnTokens(ByFunctions):
    """Runs a token mixer on this rank's tokens, before the wrapper that runs it on the full sequence."""

    effect = "own tokens of cp"
    cp_attention: ClassVar[ContextAttention]
    of_own_tokens: ClassVar[Callable[..., Any]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's tokens, or the full sequence where the module is not verified."""
        if self.cp_attention.whole_rows or not self.takes(args, kwargs):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        tokens = args[0] if args else kwargs["hidden_states"]
        padding = self.cp_attention.padding
        if padding is not None:  # a model gets the mask of full rows, and may have cut it at the left
            padding = self.cp_attention.layout(tokens.shape[1]).shard(padding.to(tokens.device))
        inputs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        args, inputs = map_arguments(
            self,  # type: ignore[arg-type]  # a mixin of modules
            args,
            inputs,
            lambda name, value: padding if is_padding_mask(name, value) else value,
        )
        return type(self).of_own_tokens(self, *args, **inputs)


def _convolve(
    attention: ContextAttention,
    function: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    layout = attention.layout(hidden_states.shape[2])
    batch, before = hidden_states.shape[0], weight.shape[1] - 1
    tokens = hidden_states.transpose(1, 2)
    halo = preceding_tokens(tokens, before, layout, attention.group)
    chunks = torch.cat([halo, torch.unflatten(tokens, 1, (*halo.shape[1:2], -1))], dim=2)
    rows = chunks.flatten(0, 1).transpose(1, 2)
    documents = attention.documents.current
    if documents is None:
        output = function(rows, weight, bias, activation=activation)
    else:
        numbers, length = pad(documents.numbers, (before, 0)), chunks.shape[2] - before
        parts = [numbers.narrow(1, chunk * length, before + length) for chunk in layout.chunks]
        numbers = torch.stack(parts, dim=1).flatten(0, 1)
        output = convolve_documents(function, rows, weight, bias, activation, numbers)
    return torch.unflatten(output[:, :, before:], 0, (batch, -1)).transpose(1, 2).flatten(2)


def _recur_by_heads(
    attention: ContextAttention, function: Callable[..., Any], recurrence: Recurrence, call: Call
) -> Tensor:
    """Compute a recurrence on this rank's share of the heads, and return all heads of its tokens."""
    tokens, further = call.tokens, dict(call.further)
    main = tokens[recurrence.heads[0]]
    layout, heads = attention.layout(main.shape[1]), main.shape[2]
    share = -(-heads // layout.ranks)
    sent = {name: padded(tokens[name], share * layout.ranks, dim=2) for name in recurrence.heads if name in tokens}
    groups = [name for name in recurrence.groups if tokens[name].shape[2] % layout.ranks == 0]
    sent |= {name: tokens[name] for name in groups}  # a group goes to the rank that gets its heads
    received = tokens_to_heads([*sent.values()], layout, attention.group, heads_dim=2, tokens_dim=1)
    exchanged = dict(zip(sent, received, strict=True))
    others = [name for name in (*recurrence.groups, *recurrence.common) if name not in groups]
    gathered = gather_features([tokens[name] for name in others], layout, attention.group) if others else []
    exchanged |= zip(others, gathered, strict=True)
    first = layout.rank * share
    for name in (name for name in recurrence.groups if name in others):
        indices = torch.arange(first, first + share, device=main.device).clamp(max=heads - 1)
        exchanged[name] = exchanged[name].index_select(2, indices // (heads // tokens[name].shape[2]))
    for name in recurrence.parameters:
        if further.get(name) is not None:
            further[name] = padded(further[name], share * layout.ranks, dim=0).narrow(0, first, share)
    output = recur(function, recurrence, Call(exchanged, further, call.places), attention.documents.current)
    return heads_to_tokens(output, layout, attention.group, heads_dim=2, tokens_dim=1).narrow(2, 0, heads)
