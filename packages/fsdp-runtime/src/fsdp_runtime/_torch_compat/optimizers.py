"""What torch's optimizers have no hook for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim import Optimizer


def watch_zero_grad(cleared: Callable[[Optimizer], None]) -> None:
    """Call a function after every ``zero_grad`` of an optimizer; torch 2.10 to 2.15 have hooks of ``step`` alone."""
    original: Any = Optimizer.zero_grad

    @wraps(original)
    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        cleared(self)

    setattr(Optimizer, "zero_grad", zero_grad)  # noqa: B010  # mypy: a method is not assigned
