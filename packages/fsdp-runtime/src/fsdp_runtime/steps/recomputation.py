"""The state of a forward that its recomputation in backward has to find again.

Backward recomputes a module with the arguments of its forward.  By then another batch may have gone forward, and scores
of a router may tie differently.  So the forward is bound to what was in force when it ran first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

Forward = Callable[..., Any]


class Carried(Protocol):
    """State that a recomputation takes from its forward."""

    def bind(self, module: nn.Module, forward: Forward) -> Forward:
        """Return a module's forward that runs under the present state, whatever is in force when it is called."""


def bound(module: nn.Module, forward: Forward, carried: tuple[Carried, ...]) -> Forward:
    """Return a forward bound to all state that is carried into its recomputation."""
    for state in carried:
        forward = state.bind(module, forward)
    return forward
