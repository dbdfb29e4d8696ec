"""A session of recording or replaying: its watched routers, and the selections of recomputations.

While a session is active, a router's forward runs under a function mode.  Activation checkpointing runs the forward of
a part of the model again in backward, perhaps after the session: the part's forward is bound to the session.  It
keeps the experts of its first run, and selects them in every later run, even if the noise of the scores differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime.errors import RoutesError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.steps.routing.routers import Router, Routers
from fsdp_runtime.steps.routing.selections import SELECTIONS
from fsdp_runtime.wrap import replace_forward, restore_forward


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
        if active:
            return _Bound(module, forward, active)
        if self.routers is None:
            return forward
        return _Bound(module, forward, (_Activation(Session(self.routers)),), watches=True)


class _Bound:
    """A module's forward with its first sessions; with ``watches`` it watches routers in the first run too."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], active: tuple[_Activation, ...], *, watches: bool = False
    ) -> None:
        self.module, self.forward, self.watches = module, forward, watches
        self.active = tuple(replace(activation, kept={}) for activation in active)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = partial(self.forward, *args, **kwargs)
        with _set(self.active):
            if not self.watches:
                self.watches = True
                return run()
            with _watching(*(activation.session for activation in self.active)):
                return _select(self.module, run)  # the module may be a router


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
