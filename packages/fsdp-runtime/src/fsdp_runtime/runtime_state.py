"""The one record that this package keeps on a module of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

#: The key in ``module.__dict__``; not a parameter, buffer or child, so state dicts do not contain it.
RUNTIME_STATE = "_fsdp_runtime_state"


@dataclass
class RuntimeState:
    """Settings and flags of one module."""

    reshard_after_forward: bool | None = None  # of ``FSDP2``; ``None`` for other code
    is_fsdp_root: bool = False  # ``FSDP2`` made it the root of its FSDP modules
    checkpoint_contexts: Callable[[], Any] | None = None  # the ``context_fn`` of selective checkpointing
    compiled: Any = None  # a block's compiled call, while it runs in Python to record outputs
    recomputes_in_python: bool = False  # outside of compiled graphs
    carried: tuple[Any, ...] = ()  # state of a forward that its recomputation takes from it
    units: Sequence[Any] = ()  # a root's FSDP modules, the root included
    marks: Sequence[Any] = ()  # a root's parameters with accumulated gradients, each with its placeholder
    versions: tuple[int, ...] | None = ()  # of shards that were copied; ``None`` for fresh copies
    unsharded: bool | None = None  # kept gathered, or not under ``max_bytes``; ``None`` outside of ``unsharded``
    no_sync: bool = False  # inside of :func:`fsdp_runtime.no_sync`
    offloaded: Any = None  # the host copies of :func:`fsdp_runtime.offload`
    watches: int = 0  # sessions and recomputations that read a router's selection
    hook_effects: list[str] = field(default_factory=list)  # what the hooks around its forward do
    documents: Any = None  # of the current packed rows, for the model's token mixers
    gathered: Any = None  # under context parallelism, what runs on full sequences
    routers: Any = None  # of a model whose routes were recorded or replayed
    one_rank: bool = False  # no other rank has part of the model
    unloaded: Any = None  # the hooks that refuse a forward with parameters on meta
    source: Any = None  # the checkpoint that the weights came from


def runtime_state(module: nn.Module) -> RuntimeState:
    """Return the module's record; an empty one is created on first use."""
    state: RuntimeState | None = module.__dict__.get(RUNTIME_STATE)
    if state is None:
        state = module.__dict__[RUNTIME_STATE] = RuntimeState()
    return state


def reshards_after_forward(module: nn.Module, *, is_root: bool) -> bool:
    """Return the FSDP module's ``reshard_after_forward``; torch's default for one that other code wrapped."""
    recorded = runtime_state(module).reshard_after_forward
    return not is_root if recorded is None else recorded
