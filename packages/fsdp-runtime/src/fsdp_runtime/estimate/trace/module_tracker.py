"""Which module of a model is running, in forward and in backward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from fsdp_runtime._torch_compat import autograd_position, running_backward_of

#: Backward nodes of parameters have numbers beyond any that an operator gets.
_NO_OPERATOR = 2**63


class Places:
    """Follows the modules that run; backward is followed by the numbers that autograd gives its nodes in forward.

    Hooks on gradients would tell too, but they change the graph, and with it what is alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._modules = {path: module for module, path in self._paths.items()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._spans: list[str] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow modules that run inside."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def now(self) -> str:
        """The path of the innermost module that runs, or whose backward does; ``""`` outside."""
        if self._stack:
            return self._stack[-1]
        number = running_backward_of()
        if number is None:
            return ""
        if number >= _NO_OPERATOR:
            return self._last
        index = bisect_right(self._starts, number) - 1
        self._last = self._spans[index] if index >= 0 else ""
        return self._last

    _last = ""

    def running(self) -> Sequence[nn.Module]:
        """The modules that run, outermost first."""
        return [self._modules[path] for path in self._stack]

    def _enter(self, module: nn.Module, _args: Any) -> None:
        path = self._paths.get(module)
        self._stack.append(self._stack[-1] if path is None and self._stack else path or "")
        self._note()

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self._starts.append(autograd_position())
        self._spans.append(self._stack[-1] if self._stack else "")
