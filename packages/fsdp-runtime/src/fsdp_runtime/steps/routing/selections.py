"""Function modes that read and replace the experts that a router's code selects.

The router's code runs unchanged.  Only the selecting operator returns other experts, with their scores gathered from
the operator's full input.  The code computes the rest as its architecture does (a softmax before or after,
normalisation, a bias that only selects, scaling factors), with its gradient.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp_runtime.errors import ModelError, RoutesError
from fsdp_runtime.steps.routing.routers import Router

_TOPK = (torch.topk, Tensor.topk)
_MAX = (torch.max, Tensor.max)


class Selection(TorchFunctionMode):
    """Reads the experts that a router selects in one forward, and replaces them if routes are given."""

    choice: Tensor | None = None

    def __init__(self, router: Router, wanted: Tensor | None, *, has_holes: bool = False) -> None:
        # ``wanted`` are ``[tokens, k]`` int64, the experts to select, and with ``has_holes`` -1 in rows routed as
        # usual.
        super().__init__()
        self.router, self.wanted, self.has_holes = router, wanted, has_holes

    def selected(self) -> Tensor:
        """Return the experts of every token, ``[tokens, k]`` int64."""
        if self.choice is None:
            raise ModelError(
                f"{self.router.path} ({type(self.router.module).__name__}) ran without a selection among its "
                f"{self.router.experts} experts: its routes can be neither recorded nor replayed"
            )
        return self.choice

    def replaced(self, ids: Tensor) -> Tensor:
        """Return the wanted experts, with the router's own experts in rows without a route, ``[tokens, k]``."""
        if self.wanted is None:
            return ids
        routes = self.wanted.to(ids.device, ids.dtype)
        if routes.shape != ids.shape:
            raise RoutesError(
                f"{self.router.path} routed {ids.shape[0]} tokens to {ids.shape[-1]} experts each, and the routes have "
                f"{routes.shape[0]} tokens with {routes.shape[-1]}: give the routes of this forward's tokens"
            )
        return torch.where(routes < 0, ids, routes) if self.has_holes else routes


class TopKSelection(Selection):
    """Selection by ``torch.topk`` over the scores of all experts, among all or some groups of experts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        scores = _scores(func, _TOPK, self.router, args, kwargs)
        if scores is None or scores.ndim != 2:
            return func(*args, **kwargs)
        width, experts = scores.shape[-1], self.router.experts
        own = _indices(func, args, kwargs)
        if width >= experts and self.router.top_k in (None, own.shape[-1]):
            self.choice = self.replaced(own)
            return _chosen(scores, self.choice)
        if 1 < width < experts and experts % width == 0:
            return _chosen(scores, own if self.wanted is None else self._groups(scores, own))
        return func(*args, **kwargs)

    def _groups(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Return groups that contain the wanted experts, then the groups with the highest scores."""
        size = self.router.experts // scores.shape[-1]
        routes = self.wanted.to(scores.device, torch.int64)  # type: ignore[union-attr]  # set, see its caller
        if routes.shape[0] != scores.shape[0]:
            return ids  # the selection refuses the routes, with the numbers
        missing = routes < 0
        group = torch.where(missing, ids[:, :1].to(torch.int64), routes // size)
        raised = scores.detach().scatter(-1, group, float("inf"))
        return raised.topk(ids.shape[-1], dim=-1).indices


class SparseMixerSelection(Selection):
    """Selection by successive maxima; training mode samples each expert near the maximum."""

    # For each expert of a token, SparseMixer takes the largest score as a threshold, then (in training mode) samples
    # the expert and takes a maximum for the gradient's estimate. Scores far below the threshold get no weight, so the
    # threshold is the wanted expert's score if the largest score would exclude the expert.
    calls = 0
    experts: tuple[Tensor, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        scores = _scores(func, _MAX, self.router, args, kwargs)
        if scores is None or not ({"dim"} & kwargs.keys() or len(args) > 1):
            return func(*args, **kwargs)
        training = self.router.module.training
        slot, step = divmod(self.calls, 3 if training else 1)
        self.calls += 1
        if step == 2:
            return func(*args, **kwargs)
        with torch.no_grad():
            result = func(*args, **kwargs)
        own = result.indices.reshape(-1, 1)
        column = None if self.wanted is None else self.wanted[:, slot : slot + 1]
        chosen = Selection(self.router, column, has_holes=self.has_holes).replaced(own)
        if step == 1 or not training:
            self.experts = (*self.experts, chosen)
            if len(self.experts) == (self.router.top_k or len(self.experts)):
                self.choice = torch.cat(self.experts, dim=-1)
        values = scores.gather(-1, chosen)
        if step == 0:
            largest = result.values.reshape(-1, 1)
            distance = (largest - values) / torch.maximum(values.abs(), largest)
            values = torch.where(distance > 2 * cast(float, self.router.module.router_jitter_noise), values, largest)
        shape = result.indices.shape
        return torch.return_types.max((values.reshape(shape), chosen.reshape(shape)))


SELECTIONS: dict[str, type[Selection]] = {
    "topk": TopKSelection,
    "sparsemixer": SparseMixerSelection,
}


def _scores(
    func: Any, selecting: tuple[Any, ...], router: Router, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the scores given to a selecting function, ``None`` for any other function."""
    if func not in selecting:
        return None
    scores: Tensor = args[0] if args else kwargs["input"]
    if isinstance(scores, DTensor):
        raise ModelError(
            f"{router.path} selects experts from a DTensor with placements {scores.placements}: routes are replayed "
            "where a router computes on plain tensors, as it does under the plans of tp_plans"
        )
    return scores


def _indices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the indices that a function selects; it saves nothing for backward."""
    # Recording and replaying thus save the same tensors: a replay may recompute a recorded forward.
    with torch.no_grad():
        indices: Tensor = func(*args, **kwargs).indices
    return indices


def _chosen(scores: Tensor, indices: Tensor) -> Any:
    """Return values and indices in the form of ``torch.topk``, for the given indices."""
    return torch.return_types.topk((scores.gather(-1, indices), indices))
