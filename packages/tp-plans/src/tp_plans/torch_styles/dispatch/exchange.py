"""How tokens travel to the ranks of their experts and back: the interface, and its reference by all-to-all.

A token is sent once to every rank that has some of its experts, however many they are, and comes back as one sum.  (The
deduplication is that of DeepSeek's DeepEP; its source is arXiv:2412.19437, section 3.2.2.)
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tp_plans.errors import CapabilityError, PlanError
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
    state: Any  # what :meth:`TokenExchange.combine` needs to send the results back


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
    """What brings the results back: tokens of this rank, the token of each row that was sent, and the row counts."""

    tokens: int
    row_token: Tensor
    sent: list[int]
    received: list[int]


class AllToAllExchange(TokenExchange):
    """The reference: ``all_to_all_single`` with the exact sizes, which are read on the host once a call.

    Five collectives forward (the sizes, the pairs, their weights, the tokens, the results) and three backward.
    """

    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor, *, experts: int) -> DispatchedTokens:
        tokens, top_k = index.shape
        ranks = self.mesh.size()
        own = experts // ranks
        expert = index.reshape(-1)
        token = torch.arange(tokens, device=index.device).repeat_interleave(top_k)
        to_rank = torch.where((expert >= 0) & (expert < experts), expert // own, ranks)

        # Pairs in the order of rank and token, so that those of one row follow one another; pairs for no rank last.
        key, order = (to_rank * max(tokens, 1) + token).sort(stable=True)
        starts_row = torch.ones_like(key)
        starts_row[1:] = key[1:] != key[:-1]
        sorted_rank = to_rank[order]
        counts = key.new_zeros(ranks + 1, 2).index_add_(
            0, sorted_rank, torch.stack([starts_row, torch.ones_like(key)], dim=1)
        )[:ranks]
        arriving = all_to_all(counts, self.mesh, [1] * ranks, [1] * ranks)
        sent_rows, sent_pairs, rows, pairs = self.read_counts(counts, arriving)

        order, sorted_rank = order[: sum(sent_pairs)], sorted_rank[: sum(sent_pairs)]
        row = starts_row[: sum(sent_pairs)].cumsum(0) - 1
        row_token = key.new_zeros(sum(sent_rows)).scatter_(0, row, token[order])
        first_row = counts[:, 0].cumsum(0) - counts[:, 0]
        code = (row - first_row[sorted_rank]) * own + expert[order] % own
        code = all_to_all(code, self.mesh, pairs, sent_pairs)

        received_rows, pair_weight = _Dispatch.apply(  # type: ignore[no-untyped-call]
            hidden[row_token], weights.reshape(-1)[order], self.mesh, (rows, sent_rows), (pairs, sent_pairs)
        )
        offset = (arriving[:, 0].cumsum(0) - arriving[:, 0]).repeat_interleave(arriving[:, 1], output_size=sum(pairs))
        return DispatchedTokens(
            rows=received_rows,
            pair_row=code // own + offset,
            pair_expert=code % own,
            pair_weight=pair_weight,
            state=_AllToAllState(tokens, row_token, sent_rows, rows),
        )

    def combine(self, rows: Tensor, dispatched: DispatchedTokens) -> Tensor:
        state: _AllToAllState = dispatched.state
        returned = exchange_rows(rows, self.mesh, state.sent, state.received)
        return sum_rows(returned, state.row_token, state.tokens)

    def read_counts(self, sent: Tensor, received: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return the rows and pairs sent to each rank, and received from it, as numbers; waits for the device."""
        numbers = torch.cat([sent, received], dim=1).t().tolist()
        return numbers[0], numbers[1], numbers[2], numbers[3]


class _Dispatch(torch.autograd.Function):
    """Send rows and the weights of their pairs; one node, so that every rank's backward has one order."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, mesh: DeviceMesh, by_row: _Splits, by_pair: _Splits
    ) -> tuple[Tensor, Tensor]:
        ctx.mesh, ctx.by_row, ctx.by_pair = mesh, by_row, by_pair
        return all_to_all(rows, mesh, *by_row), all_to_all(weights, mesh, *by_pair)

    @staticmethod
    def backward(ctx: Any, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows = all_to_all(rows, ctx.mesh, *reversed(ctx.by_row))
        return rows, all_to_all(weights, ctx.mesh, *reversed(ctx.by_pair)), None, None, None


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


#: Kernels that can take the place of the reference: name to the package that has them.
_KERNELS: Mapping[str, str] = {"deepep": "deep_ep", "hybridep": "deep_ep"}


def exchange_class(exchange: object) -> type[TokenExchange]:
    """Return the class of an exchange by name, or the class itself.

    Args:
        exchange: ``"all_to_all"``; ``"deepep"`` or ``"hybridep"``, for which this package has no adapter yet; or a
            subclass of :class:`TokenExchange`.

    Raises:
        CapabilityError: the kernels are not installed, or no adapter is written for them.
        PlanError: the name is unknown.
    """
    if isinstance(exchange, type) and issubclass(exchange, TokenExchange):
        return exchange
    if exchange == "all_to_all":
        return AllToAllExchange
    if (package := _KERNELS.get(str(exchange))) is not None:
        installed = importlib.util.find_spec(package) is not None
        reason = "has no adapter here" if installed else "is not installed"
        raise CapabilityError(
            f"exchange={exchange!r} needs the kernels of {package}, which {reason}: use 'all_to_all', or pass a "
            "subclass of tp_plans.runtime.TokenExchange that calls them"
        )
    raise PlanError(
        f"exchange={exchange!r} is unknown: write 'all_to_all', {', '.join(map(repr, _KERNELS))}, or a TokenExchange"
    )
