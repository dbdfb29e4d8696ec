"""Values that a dry run assumes: the experts of tokens, and results of data-dependent operators.

The experts of tokens decide the sizes of the all-to-alls of expert parallelism.
``balanced`` is a router that chooses any ``top_k`` experts equally often.  A token then goes to

    ``ranks * (1 - C(experts - experts / ranks, top_k) / C(experts, top_k))``

ranks on average: each rank has one of its experts unless all are chosen from other ranks.  ``worst`` is a router that
gives every token of every rank as many of the simulated rank's experts as possible, and other experts evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fsdp_runtime._torch_compat import operator_name
from fsdp_runtime.dry_run.types import Assumption
from tp_plans.naming import EXPERT_COUNTS
from tp_plans.runtime import AllToAllExchange, DispatchedTokens

Routing = Literal["balanced", "worst"]
aten = torch.ops.aten

#: Operators with results that a dry run assumes.
DATA_DEPENDENT = frozenset({aten._local_scalar_dense.default, aten.nonzero.default})

#: Grouped matrix products: CPUs and GPUs run them in every dtype, fake tensors only in bfloat16 (torch 2.11 to 2.15).
GROUPED_MM = frozenset({aten._grouped_mm.default})

_CHECKS = frozenset({"all", "is_all_true", "_is_all_true", "equal", "is_same_size", "allclose"})
_COUNTS = frozenset({"histc", "bincount"})
_ORIGIN = "_fsdp_runtime_origin"


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


def remember_origin(function: Any, args: Any, result: Any) -> None:
    """Attach to a boolean scalar or a table of counts the operator that made it, for :func:`assume_result`."""
    if not isinstance(result, Tensor):
        return
    name = operator_name(function).rstrip("_")
    if (result.dtype == torch.bool and result.ndim == 0) or name in _COUNTS:
        setattr(result, _ORIGIN, (name, args[0].numel() if isinstance(args[0], Tensor) else 0))


def assume_result(function: Any, tensor: Tensor, running: Sequence[nn.Module]) -> tuple[Any, str]:
    """Return an assumed result of an operator of ``DATA_DEPENDENT`` on a tensor, and the assumption in words."""
    # ``running`` are the running modules, outermost first.
    if function is aten.nonzero.default:
        rows = _selected(tensor, num_experts_of(running))
        assumption = (
            f"{rows} of {tensor.numel()} elements are selected: tokens are spread evenly over experts. "
            "A rank needs more memory where its experts get more tokens"
        )
        return tensor.new_empty((rows, tensor.ndim), dtype=torch.int64), assumption
    name, elements = getattr(tensor, _ORIGIN, ("", 0))
    if tensor.dtype == torch.bool:
        passes = name in _CHECKS
        if passes:
            return True, "a check of values passes, as in every run without an error; no number depends on it"
        return False, "a condition on values is false; if it is true in a run, other code runs than was counted"
    if tensor.dtype.is_floating_point:
        return 1.0, "a value that the code reads is 1.0; numbers depend on it only where sizes do"
    if name in _COUNTS and elements:
        each = elements // max(1, tensor.numel())
        return each, f"a count is {each}: tokens are spread evenly over experts"
    return 0, "an index that the code reads is 0; numbers depend on it only where sizes do"


def grouped_mm(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the empty result of a grouped matrix product: one row per row of ``left``, or one matrix per group."""
    if left.ndim == 2 and right.ndim == 2 and offsets is not None:
        return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def num_experts_of(running: Sequence[nn.Module]) -> int | None:
    """Return the number of experts of the innermost module that has one."""
    for module in reversed(running):
        for name in EXPERT_COUNTS:
            if isinstance(count := getattr(module, name, None), int) and count > 0:
                return count
    return None


def _selected(tensor: Tensor, experts: int | None) -> int:
    """Return the selected elements of a mask: every expert, or an even share of tokens."""
    if experts is None:
        return tensor.numel()
    if tensor.numel() in (experts, experts + 1):  # some models count an expert for tokens without experts
        return experts
    return -(-tensor.numel() // experts)
