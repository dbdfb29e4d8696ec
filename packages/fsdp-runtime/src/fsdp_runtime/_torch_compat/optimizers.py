"""Hooks that torch's optimizers lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer


def watch_zero_grad(cleared: Callable[[Optimizer], None]) -> None:
    """Call a function after every ``zero_grad`` of an optimizer; torch 2.10 to 2.15 have hooks of ``step`` alone."""
    original: Any = Optimizer.zero_grad

    @wraps(original)
    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        cleared(self)

    setattr(Optimizer, "zero_grad", zero_grad)  # noqa: B010  # mypy: a method is not assigned


def watch_clipping(before: Callable[[Iterable[Tensor]], None]) -> None:
    """Call a function with the parameters before torch scales their gradients; torch 2.10 to 2.15 have no hook."""
    original: Any = clip_grad._clip_grads_with_norm_

    @wraps(original)
    def scale(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before(listed)
        original(listed, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = scale
