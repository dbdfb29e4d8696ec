"""Track the running module of a model, in forward and in backward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fsdp_runtime._torch_compat import autograd_position, running_backward_of

#: Backward nodes of parameters have sequence numbers above every operator's.
_NO_OPERATOR = 2**63


class ModuleTracker:
    """Track running modules; backward is attributed by the sequence numbers that autograd assigns in forward."""

    # ``torch.utils.module_tracker`` uses gradient hooks instead, which change the graph and extend lifetimes, so that
    # memory would be counted wrongly.

    def __init__(self, model: nn.Module) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._modules = {path: module for module, path in self._paths.items()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._path_at_start: list[str] = []
        self._last_backward = ""

    @contextmanager
    def track(self) -> Iterator[None]:
        """Track modules that run inside."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def current_path(self) -> str:
        """Return the path of the innermost module in forward or backward; ``""`` outside."""
        if self._stack:
            return self._stack[-1]
        number = running_backward_of()
        if number is None:
            return ""
        if number >= _NO_OPERATOR:
            return self._last_backward
        index = bisect_right(self._starts, number) - 1
        self._last_backward = self._path_at_start[index] if index >= 0 else ""
        return self._last_backward

    def running_modules(self) -> Sequence[nn.Module]:
        """Return the modules in forward, outermost first."""
        return [self._modules[path] for path in self._stack]

    def _enter(self, module: nn.Module, _args: Any) -> None:
        path = self._paths.get(module)
        self._stack.append(self._stack[-1] if path is None and self._stack else path or "")
        self._note_start()

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._stack.pop()
        self._note_start()

    def _note_start(self) -> None:
        self._starts.append(autograd_position())
        self._path_at_start.append(self._stack[-1] if self._stack else "")
