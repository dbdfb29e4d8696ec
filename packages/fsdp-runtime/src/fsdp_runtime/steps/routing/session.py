"""A session of recording or replaying: its watched routers, and the selections of recomputations.

While a session is active, a router's forward runs unchanged under a function mode.  Only the selecting operator returns
other experts, with their scores gathered from the operator's full input.  The code computes the rest as its
architecture does (a softmax before or after, normalisation, a bias that only selects, scaling factors), with its
gradient.

Activation checkpointing runs the forward of a part of the model again in backward, perhaps after the session: the
part's forward is bound to the session.  It keeps the experts of its first run, and selects them in every later run,
even if the noise of the scores differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp_runtime.errors import ModelError, RoutesError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.steps.routing.routers import Router, Routers
from fsdp_runtime.wrap import replace_forward, restore_forward

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
        # The selection saves nothing for backward. Recording and replaying thus save the same tensors: a replay may
        # recompute a recorded forward.
        with torch.no_grad():
            own: Tensor = func(*args, **kwargs).indices
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


def _chosen(scores: Tensor, indices: Tensor) -> Any:
    return torch.return_types.topk((scores.gather(-1, indices), indices))


@dataclass(eq=False)
class Session:
    """One ``with`` block of recording or replaying."""

    routers: Routers
    wanted: Callable[[Router], Tensor | None] | None = None  # the routes of one forward's local tokens, to be replayed
    has_holes: bool = False  # some tokens have no route
    recorded: dict[Any, Tensor] = field(default_factory=dict)  # by path, in pipeline stages by micro-batch and path
    stages: Any = None  # of a model in pipeline stages

    @cached_property
    def by_module(self) -> dict[nn.Module, Router]:
        """The routers by module."""
        return {router.module: router for router in self.routers.by_path.values()}

    def select(self, router: Router, kept: dict[str, Tensor] | None, forward: Callable[[], Any]) -> Any:
        """Run a router's forward; record or replay its selection."""
        # ``kept`` are the experts of a recomputed part's first run; the first run writes them.
        again = None if kept is None else kept.get(router.path)
        place = None if self.stages is None else getattr(self.stages.run, "tokens", None)
        if self.stages is not None and place is None and again is None:
            return forward()  # the forward finds the shapes of tensors between stages
        wanted = again if again is not None or self.wanted is None else self.wanted(router)
        selection = SELECTIONS[router.kind](router, wanted, has_holes=again is None and self.has_holes)
        with selection:
            output = forward()
        experts = selection.selected().detach()
        if again is not None:
            return output
        key = router.path if place is None else (place.micro_batch, router.path)
        if self.wanted is None and key in self.recorded:
            raise RoutesError(
                f"{router.path} ran a second time inside record_routes, which records one forward: use one `with` for "
                "each forward"
            )
        compact = experts.to(torch.int16 if router.experts < 2**15 else torch.int32)
        self.recorded[key] = compact
        if kept is not None:
            kept[router.path] = compact
        return output


@dataclass(frozen=True, eq=False)
class _Activation:
    """An active session, and the kept experts of a recomputed part that runs now, else ``None``."""

    session: Session
    kept: dict[str, Tensor] | None = None


_active: ContextVar[tuple[_Activation, ...]] = ContextVar("fsdp_runtime_routes", default=())


@contextmanager
def activated(session: Session) -> Iterator[None]:
    """Watch the routers of a session; the innermost session of a model takes effect."""
    with _watching(session), _set((*_active.get(), _Activation(session))):
        yield


@dataclass(frozen=True, eq=False)
class CarriedRoutes:
    """Repeat the selections of a forward in its recomputation."""

    # ``routers`` are inside a module that sends tokens to other ranks: with other selections, the numbers of exchanged
    # tokens would differ from the saved numbers. ``None`` if only user sessions are carried.
    routers: Routers | None = None

    def bind(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that selects the experts of its first call in every later call, in any session."""
        active = _active.get()
        watches = not active  # the routers in the first run too; a user's session does it then
        if watches and self.routers is not None:
            active = (_Activation(Session(self.routers)),)
        if not active:
            return forward
        active = tuple(replace(activation, kept={}) for activation in active)

        def bound(*args: Any, **kwargs: Any) -> Any:
            nonlocal watches
            run = partial(forward, *args, **kwargs)
            with _set(active):
                if not watches:
                    watches = True
                    return run()
                with _watching(*(activation.session for activation in active)):
                    return _select(module, run)  # the module may be a router

        return bound


@contextmanager
def _set(active: tuple[_Activation, ...]) -> Iterator[None]:
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def _watching(*sessions: Session) -> Iterator[None]:
    """Wrap the routers' forwards to ask the active sessions; counted, since sessions and recomputations overlap."""
    modules = [router.module for session in sessions for router in session.routers.by_path.values()]
    for module in modules:
        state = runtime_state(module)
        state.watches += 1
        if state.watches == 1:
            watched = _Watched(module)
            watched.patched = replace_forward(module, watched)
    try:
        yield
    finally:
        for module in modules:
            state = runtime_state(module)
            state.watches -= 1
            if state.watches == 0:
                restore_forward(module, module.__dict__["forward"].patched)


class _Watched:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.patched: Callable[..., Any] | None = None  # the instance's earlier forward, set by other code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.patched or partial(type(self.module).forward, self.module)
        return _select(self.module, partial(forward, *args, **kwargs))


def _select(module: nn.Module, forward: Callable[[], Any]) -> Any:
    """Run a forward, under the innermost session that has the module among its routers."""
    for active in reversed(_active.get()):
        if (router := active.session.by_module.get(module)) is not None:
            return active.session.select(router, active.kept, forward)
    return forward()
