"""Recomputation that sends every token to the experts of the first forward.

A kernel may sum in another order when a block is recomputed, and a token whose scores nearly tie then goes to another
expert: gradients of two different forwards are mixed, and other numbers of tokens are exchanged than were saved.  (The
source of the remedy, routes that are replayed, is arXiv:2510.11370.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime._torch_compat import TorchDispatchMode


def pinned_routes() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward and of its recomputation: a ``context_fn`` of ``torch.utils.checkpoint``."""
    chosen: list[Tensor] = []
    return _Record(chosen), _Replay(chosen)


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the indices that every ``topk`` chooses."""

    def __init__(self, chosen: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen = chosen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self.chosen.append(result[1].clone())  # the model may write into its own
        return result


class _Replay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every ``topk`` the indices of the first forward, with the values that stand there now."""

    def __init__(self, chosen: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen = chosen
        self.position = 0

    def __enter__(self) -> Any:
        self.position = 0  # backward may run twice over a retained graph
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.topk.default or self.position >= len(self.chosen):
            return func(*args, **kwargs)
        index = self.chosen[self.position]
        self.position += 1
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return args[0].gather(dim, index), index.clone()
