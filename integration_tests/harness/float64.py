"""Run model code that computes parts in float32 in float64, so that a comparison needs no allowance for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_active = ContextVar("active", default=False)


@contextmanager
def compute_in_float64() -> Iterator[None]:
    """Turn every request for float32 (norms, rotary embeddings, routers) into one for float64.

    That holds for what backward recomputes too: a function mode is off inside the functions that it handles, backward
    among them, so the modules that are called there enter it anew.
    """
    call = nn.Module.__call__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _active.get():
            return call(module, *args, **kwargs)
        with _entered():
            return call(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", called), _entered():
        yield


@contextmanager
def _entered() -> Iterator[None]:
    token = _active.set(True)
    try:
        with _InFloat64():
            yield
    finally:
        _active.reset(token)


class _InFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        token = _active.set(func not in (Tensor.backward, torch.autograd.backward))
        try:
            return func(*args, **kwargs)
        finally:
            _active.reset(token)
