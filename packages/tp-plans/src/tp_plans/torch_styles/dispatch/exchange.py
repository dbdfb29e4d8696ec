"""The travel of tokens to the ranks of their experts and back: the interface, and its reference by all-to-all.

A token is sent once to every rank that has some of its experts, and comes back as one sum (as in DeepSeek's DeepEP,
arXiv:2412.19437, section 3.2.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tp_plans.errors import PlanError
from tp_plans.torch_styles._host_time_compat import direct
from tp_plans.torch_styles.collectives import gather
from tp_plans.torch_styles.dispatch.rows import sum_rows
from tp_plans.torch_styles.row_all_to_all import all_to_all, exchange_rows

#: Rows from each rank, and to each.
_Splits = tuple[list[int], list[int]]


@dataclass(frozen=True)
class DispatchedTokens:
    """The tokens that came to a rank, and which of its experts they are for; a *pair* is a token with one expert."""

    rows: Tensor  # ``[rows, hidden]``, one for every token and rank that it came from
    pair_row: Tensor  # ``[pairs]``, the row of each pair
    pair_expert: Tensor  # ``[pairs]``, its expert, counted from this rank's first
    pair_weight: Tensor  # ``[pairs]``, its routing weight
    state: Any  # for :meth:`TokenExchange.combine`, which sends the results back


class TokenExchange(ABC):
    """Sends tokens to the ranks of their experts and the results back; both directions are differentiable.

    Every rank of the axis takes part in every call, whether it has tokens or not.

    Args:
        mesh: the axis ``ep``.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    @abstractmethod
    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor, *, experts: int) -> DispatchedTokens:
        """Send tokens to the ranks of their experts.

        Args:
            hidden: ``[tokens, hidden]``, this rank's own tokens.
            index: ``[tokens, top_k]``, their experts; numbers below 0 or from ``experts`` on stand for none.
            weights: ``[tokens, top_k]``, the routing weights.
            experts: the number of experts of all ranks, a multiple of their number.
        """

    def read_sizes(self, gathered: Tensor, own: int) -> list[int]:
        """Return the tokens of each rank as numbers, for experts that all get every token; waits for the device.

        Args:
            gathered: ``[ranks]``, the number of tokens of each rank.
            own: this rank's.
        """
        sizes: list[int] = gathered.tolist()
        return sizes

    @abstractmethod
    def combine(self, rows: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """Send the results ``[rows, hidden]`` back and sum them for every token: ``[tokens, hidden]``."""


@dataclass(frozen=True)
class _AllToAllState:
    """State for the way back: this rank's number of tokens, the token of each row that was sent, the row counts."""

    tokens: int
    row_token: Tensor
    sent: list[int]
    received: list[int]


class AllToAllExchange(TokenExchange):
    """The reference: ``all_to_all_single`` with the exact sizes, which are read on the host once a call.

    Four collectives forward (the sizes, the pairs with their weights, the tokens, the results) and three backward.
    """

    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor, *, experts: int) -> DispatchedTokens:
        tokens, top_k = index.shape
        ranks = self.mesh.size()
        own = experts // ranks
        expert = index.reshape(-1)
        # No rank where the number stands for none: a negative one without its sign bit is larger than any other.
        to_rank = (expert // own).bitwise_and_(torch.iinfo(expert.dtype).max).clamp_(max=ranks)

        # Pairs in the order of rank and token: pairs of one row follow one another, pairs for no rank come last.
        sorted_rank, order = to_rank.sort(stable=True)
        token = order // top_k
        starts_row = _starts(torch.add(token, sorted_rank, alpha=max(tokens, 1)))
        rows_until = starts_row.new_zeros(len(order) + 1)  # until each pair, and in all
        torch.cumsum(starts_row, 0, out=rows_until[1:])
        pairs_until = torch.searchsorted(sorted_rank, torch.arange(-1, ranks, out=sorted_rank.new_empty(0)), right=True)
        until = torch.stack([rows_until[pairs_until], pairs_until], dim=1)
        counts = until[1:] - until[:-1]
        arriving = all_to_all(counts, self.mesh, [1] * ranks, [1] * ranks)
        sent_rows, sent_pairs, rows, pairs = self.read_counts(counts, arriving)

        sent, places = sum(sent_pairs), sum(sent_rows) + 1  # the first place is of no row: they are counted from 1
        order, token = order[:sent], token[:sent]
        row_token = token.new_zeros(places).scatter_(0, rows_until[1 : sent + 1], token)[1:]
        code = torch.add(starts_row[:sent], expert[order], alpha=2)
        received, code, pair_weight = _dispatch(
            hidden, weights, (row_token, order, code), self.mesh, (rows, sent_rows), (pairs, sent_pairs)
        )
        return DispatchedTokens(
            rows=received,
            pair_row=(code & 1).cumsum(0).sub_(1),
            pair_expert=(code >> 1).remainder_(own),
            pair_weight=pair_weight,
            state=_AllToAllState(tokens, row_token, sent_rows, rows),
        )

    def combine(self, rows: Tensor, dispatched: DispatchedTokens) -> Tensor:
        state: _AllToAllState = dispatched.state
        summed: Tensor = _combine(rows, state.row_token, state.tokens, self.mesh, (state.sent, state.received))
        return summed

    def read_counts(self, sent: Tensor, received: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return the rows and pairs sent to each rank, and received from it, as numbers; waits for the device."""
        numbers = torch.cat([sent, received], dim=1).t().tolist()
        return numbers[0], numbers[1], numbers[2], numbers[3]


def _starts(key: Tensor) -> Tensor:
    """Return 1 where a number differs from the one before, and at the first one; else 0."""
    starts = torch.ones_like(key)
    torch.ne(key[1:], key[:-1], out=starts[1:])
    return starts


class _Dispatch(torch.autograd.Function):
    """Send rows, and the codes and weights of their pairs; one node, so that every rank's backward has one order."""

    # A pair's code is twice its expert, and one more where it is the first of its row.

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        pairs: tuple[Tensor, Tensor, Tensor],
        mesh: DeviceMesh,
        by_row: _Splits,
        by_pair: _Splits,
    ) -> tuple[Tensor, Tensor, Tensor]:
        row_token, order, code = pairs
        ctx.mesh, ctx.by_row, ctx.by_pair = mesh, by_row, by_pair
        ctx.tokens, ctx.shape = len(hidden), weights.shape
        ctx.save_for_backward(row_token, order)
        weight = weights.reshape(-1).index_select(0, order)
        code, weight = _unpacked(all_to_all(_packed(code, weight), mesh, *by_pair), code, weight)
        ctx.mark_non_differentiable(code)
        return all_to_all(hidden.index_select(0, row_token), mesh, *by_row), code, weight

    @staticmethod
    def backward(ctx: Any, rows: Tensor, _: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        row_token, order = ctx.saved_tensors
        rows = all_to_all(rows, ctx.mesh, *reversed(ctx.by_row))
        weight = all_to_all(weight, ctx.mesh, *reversed(ctx.by_pair))
        weights = weight.new_zeros(ctx.shape.numel()).scatter_(0, order, weight).view(ctx.shape)
        return sum_rows(rows, row_token, ctx.tokens), weights, None, None, None, None


def _packed(code: Tensor, weight: Tensor) -> Tensor:
    """Return codes and weights of pairs as the bits of integers ``[pairs, 2]``, so that they are sent together."""
    wide = weight.double() if weight.element_size() == 8 else weight.float()
    bits = torch.int64 if weight.element_size() == 8 else torch.int32
    return torch.stack([code.to(bits), wide.view(bits)], dim=1)


def _unpacked(pairs: Tensor, code: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and weights of :func:`_packed`, in the dtypes of some."""
    wide = torch.float64 if pairs.dtype == torch.int64 else torch.float32
    return pairs[:, 0].to(code.dtype), pairs[:, 1].contiguous().view(wide).to(weight.dtype)


class _Combine(torch.autograd.Function):
    """Send rows back to the ranks of their tokens, and sum them there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_token: Tensor, tokens: int, mesh: DeviceMesh, splits: _Splits) -> Tensor:
        ctx.mesh, ctx.splits = mesh, splits
        ctx.save_for_backward(row_token)
        return sum_rows(all_to_all(rows, mesh, *splits), row_token, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (row_token,) = ctx.saved_tensors
        rows = all_to_all(gradient.index_select(0, row_token), ctx.mesh, *reversed(ctx.splits))
        return rows, None, None, None, None


_dispatch, _combine = direct(_Dispatch), direct(_Combine)


def to_experts(exchange: TokenExchange, tokens: Tensor) -> tuple[Tensor, list[int]]:
    """Send every expert's tokens ``[experts, tokens, hidden]``, of any number of tokens on each rank, to its rank."""
    # Returns ``[own experts, tokens of all ranks, hidden]``, and the number of tokens of each rank.
    mesh, (experts, number, hidden) = exchange.mesh, tokens.shape
    ranks = mesh.size()
    own = experts // ranks
    sizes = exchange.read_sizes(gather(torch.tensor([number], device=tokens.device), mesh, 0, ranks), number)
    received = [own * size for size in sizes]
    arrived = exchange_rows(tokens.reshape(-1, hidden), mesh, received, [own * number] * ranks)
    return torch.cat(
        [part.view(own, len(part) // own, hidden) for part in torch.split(arrived, received)], dim=1
    ), sizes


def from_experts(mesh: DeviceMesh, outputs: Tensor, sizes: list[int]) -> Tensor:
    """Send the results ``[own experts, tokens of all ranks, hidden]`` back: ``[experts, tokens, hidden]``."""
    own, _, hidden = outputs.shape
    number, ranks = sizes[mesh.get_local_rank()], mesh.size()
    sent = torch.cat([part.reshape(-1, hidden) for part in torch.split(outputs, sizes, dim=1)])
    arrived = exchange_rows(sent, mesh, [own * number] * ranks, [own * size for size in sizes])
    return arrived.view(ranks * own, number, hidden)


def exchange_class(exchange: object) -> type[TokenExchange]:
    """Return the class of an exchange: of the name ``"all_to_all"``, or a subclass of ``TokenExchange`` itself."""
    if isinstance(exchange, type) and issubclass(exchange, TokenExchange):
        return exchange
    if exchange == "all_to_all":
        return AllToAllExchange
    raise PlanError(
        f"exchange={exchange!r} is unknown: write 'all_to_all', or give a subclass of tp_plans.runtime.TokenExchange "
        "that calls the kernels"
    )
