"""The functions that ``gradient_checkpointing_enable`` recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_runtime._torch_compat import modules_of


@contextmanager
def checkpointing_through(model: nn.Module, bind: Callable[[nn.Module, Callable[..., Any]], Any]) -> Iterator[None]:
    """Pass functions that ``gradient_checkpointing_enable`` recomputes through ``bind`` within the context."""
    # The enabled modules carry the checkpoint function as ``_gradient_checkpointing_func`` (5.10 to 5.24), which has no
    # public accessor.
    name = "_gradient_checkpointing_func"
    functions = {module: vars(module)[name] for module in modules_of(model) if callable(vars(module).get(name))}
    for module, checkpoint in functions.items():
        vars(module)[name] = _through(module, checkpoint, bind)
    try:
        yield
    finally:
        for module, checkpoint in functions.items():
            vars(module)[name] = checkpoint


def _through(module: nn.Module, checkpoint: Callable[..., Any], bind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda function, *args: checkpoint(bind(module, function), *args)
