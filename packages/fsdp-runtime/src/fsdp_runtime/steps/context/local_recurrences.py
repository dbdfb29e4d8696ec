"""Convolutions and recurrences under context parallelism: each rank computes its own tokens.

Projections, norms and gates are computed for this rank's tokens only.  A convolution gets the few tokens before each
chunk from the ranks that have them (a halo), and a recurrence runs on its share of the heads over all tokens, between
two all-to-alls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsdp_runtime.steps.context.attention import ContextAttention
from fsdp_runtime.steps.context.exchange import (
    gather_features,
    heads_to_tokens,
    preceding_tokens,
    tokens_to_heads,
)
from fsdp_runtime.steps.context.sharding import padded
from fsdp_runtime.steps.documents.isolation import BOUNDARIES, is_padding_mask, map_arguments
from fsdp_runtime.steps.documents.recurrences import ByFunctions
from fsdp_runtime.steps.documents.sequence_functions import (
    Call,
    Recurrence,
    convolve_documents,
    recur,
    with_functions,
)


def forward_on_own_tokens(cls: type, attention: ContextAttention) -> Callable[..., Any]:
    """Return a forward of a class of token mixers for the tokens of one rank."""
    return with_functions(cls, partial(_convolve, attention), partial(_recur_by_heads, attention))


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
    """Convolve this rank's tokens."""
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
