"""Assume the experts of tokens: they decide the sizes of the all-to-alls of expert parallelism.

``balanced`` is a router that chooses any ``top_k`` experts equally often.  A token then goes to

    ``ranks * (1 - C(experts - experts / ranks, top_k) / C(experts, top_k))``

ranks on average: each rank has one of its experts unless all are chosen from other ranks.  ``worst`` is a router that
gives every token of every rank as many of the simulated rank's experts as possible, and other experts evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Any, Literal, get_args

from torch import Tensor

from fsdp_runtime.dry_run.types import Assumption
from fsdp_runtime.errors import EstimateError
from tp_plans.runtime import AllToAllExchange, DispatchedTokens

Routing = Literal["balanced", "worst"]


@dataclass(frozen=True)
class AssumedRoutes:
    """Numbers of one dispatch that determine its sizes."""

    tokens: int  # tokens that a rank of ``ep`` sends, after ranks with the same tokens have divided them
    top_k: int  # experts of a token
    experts: int  # number of all experts
    ranks: int  # size of ``ep``
    rank: int  # the simulated rank's index in ``ep``

    def sent(self, routing: Routing) -> tuple[list[int], list[int]]:
        """Return the rows and the pairs of a token and an expert that this rank sends to each rank."""
        if routing == "balanced" or self.ranks == 1:
            return self._even(self.top_k, self.experts, self.ranks)
        here = min(self.top_k, self.experts // self.ranks)
        others = self.experts - self.experts // self.ranks
        rows, pairs = self._even(self.top_k - here, others, self.ranks - 1)
        rows.insert(self.rank, self.tokens)
        pairs.insert(self.rank, self.tokens * here)
        return rows, pairs

    def received(self, routing: Routing) -> tuple[int, int]:
        """Return the rows and the pairs that this rank gets from each rank."""
        rows, pairs = self.sent(routing)
        return rows[self.rank], pairs[self.rank]

    def _even(self, top_k: int, experts: int, ranks: int) -> tuple[list[int], list[int]]:
        each, more = divmod(self.tokens * top_k, ranks)
        pairs = [each + (rank < more) for rank in range(ranks)]
        share = mean_destinations(experts, top_k, ranks) / ranks
        return [min(round(self.tokens * share), self.tokens, number) for number in pairs], pairs


def mean_destinations(experts: int, top_k: int, ranks: int) -> float:
    """Return the mean number of ranks that a token goes to, if any ``top_k`` experts are chosen equally often."""
    return ranks * (1 - comb(experts - experts // ranks, top_k) / comb(experts, top_k))


class AssumedExchange(AllToAllExchange):
    """The reference exchange with assumed sizes; subclasses from :func:`assumed_exchange`."""

    routing: Routing
    seen: dict[AssumedRoutes, None]
    _routes: AssumedRoutes

    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor, *, experts: int) -> DispatchedTokens:
        """Send tokens as the routing says."""
        tokens, top_k = index.shape
        self._routes = AssumedRoutes(tokens, top_k, experts, self.mesh.size(), self.mesh.get_local_rank())
        self.seen[self._routes] = None
        return super().dispatch(hidden, index, weights, experts=experts)

    def read_counts(self, sent: Tensor, received: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return the assumed numbers; other ranks have the same numbers as this rank."""
        rows, pairs = self._routes.received(self.routing)
        return *self._routes.sent(self.routing), [rows] * len(received), [pairs] * len(received)

    def read_sizes(self, gathered: Tensor, own: int) -> list[int]:
        """Return this rank's number of tokens for every rank."""
        return [own] * len(gathered)


def assumed_exchange(routing: Routing) -> type[AssumedExchange]:
    """Return an exchange with assumed routes, which remembers the arguments of its calls."""
    if routing not in get_args(Routing):
        raise EstimateError(f"routing={routing!r}: write one of {', '.join(get_args(Routing))}")
    members: dict[str, Any] = {"routing": routing, "seen": {}}
    return type("AssumedExchange", (AssumedExchange,), members)


def routing_assumptions(exchange: type[AssumedExchange], module: str) -> list[Assumption]:
    """Return in words, after the step, the assumed routes of modules with experts, and of the other routing."""
    texts = [_in_words(routes, exchange.routing) for routes in exchange.seen]
    return [Assumption(operator="", module=module, assumption=text) for text in texts]


def _in_words(routes: AssumedRoutes, routing: Routing) -> str:
    worst = "every token of the axis ep has as many of this rank's experts as it can"
    balanced = f"the router chooses any {routes.top_k} of {routes.experts} experts equally often"
    numbers = {each: _numbers(routes, each) for each in ("balanced", "worst")}
    if routing == "worst":
        return f"{worst}: {numbers['worst']}; routing='balanced' has {numbers['balanced']}"
    return f"{balanced}: {numbers['balanced']}; where {worst} (routing='worst'), {numbers['worst']}"


def _numbers(routes: AssumedRoutes, routing: Routing) -> str:
    rows, pairs = routes.received(routing)
    sent, others = sum(routes.sent(routing)[0]) - rows, routes.ranks - 1
    return (
        f"in a layer this rank sends {sent:,} rows of its {routes.tokens:,} tokens to other ranks, gets "
        f"{rows * others:,} from them, and computes {pairs * routes.ranks:,} pairs of a token and an expert"
    )
