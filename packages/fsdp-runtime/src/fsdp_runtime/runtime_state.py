"""The record that this package keeps on a user's module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

#: The key in ``module.__dict__``; not a parameter, buffer or child, so state dicts do not contain it.
RUNTIME_STATE = "_fsdp_runtime_state"


@dataclass
class RuntimeState:
    """Settings and flags of one module."""

    reshard_after_forward: bool | None = None  # of the step ``FSDP2``; ``None`` if other code wrapped the module
    is_fsdp_root: bool = False  # ``FSDP2`` made it the root of its FSDP modules
    checkpoint_contexts: Callable[[], Any] | None = None  # the ``context_fn`` of selective checkpointing
    arriving: Callable[[], None] | None = None  # waits for the parameters of a step in another thread
    activations: Any = None  # the order of the blocks with activations on the host
    compiled: Any = None  # the compiled forward of blocks; ``None`` while outputs are recorded
    plain_parameters: Any = None  # of a compiled block, the parameters that are unwrapped before its graph
    recomputes_in_python: bool = False  # outside of compiled graphs
    carried: tuple[Any, ...] = ()  # state that a forward passes to its recomputation
    units: Sequence[Any] = ()  # a root's FSDP modules, the root included
    marks: Sequence[Any] = ()  # a root's parameters with accumulated gradients, and their placeholders
    versions: tuple[int, ...] | None = ()  # of the gathered shards; ``None`` for fresh copies
    unsharded: bool | None = None  # kept gathered, or not under ``max_bytes``; ``None`` outside of ``unsharded``
    no_sync: bool = False  # inside of :func:`fsdp_runtime.no_sync`
    offloaded: Any = None  # the host copies of :func:`fsdp_runtime.offload`
    watches: int = 0  # number of sessions and recomputations that read a router's selection
    hook_effects: list[str] = field(default_factory=list)  # effects of the hooks around the module's forward
    documents: Any = None  # of the current packed rows, for the model's token mixers
    attention: Any = None  # the kernels of attention over packed rows and over cp
    gathered: Any = None  # under context parallelism, the attention and the modules that keep their own
    routers: Any = None  # of a model with recorded or replayed routes
    mesh: Any = None  # the model was parallelized on it
    stages: Any = None  # of a model in pipeline stages, its ``StagedModel``
    part: Any = None  # the place of a block, embedding or head in the pipeline's stages
    fused_rows: Any = None  # rows of the matrices in fused weights by module, under ``tp``
    unloaded: Any = None  # the hooks that refuse a forward with parameters on meta
    not_quantized: Mapping[str, str] = field(default_factory=dict)  # matrices in blocks, with the reason
    multi_token: int = 0  # number of multi-token heads among the blocks
    multi_token_heads: Any = None  # their ``MultiTokenHeads``
    source: Any = None  # the checkpoint that the weights came from

    def __getstate__(self) -> dict[str, Any]:
        """Leave compiled code out of copies, as ``nn.Module`` does."""
        return {**self.__dict__, "compiled": None, "plain_parameters": None}


def runtime_state(module: nn.Module) -> RuntimeState:
    """Return the module's record; an empty one is created on first use."""
    state: RuntimeState | None = module.__dict__.get(RUNTIME_STATE)
    if state is None:
        state = module.__dict__[RUNTIME_STATE] = RuntimeState()
    return state


def reshards_after_forward(module: nn.Module, *, is_root: bool) -> bool:
    """Return the FSDP module's ``reshard_after_forward``; torch's default if other code wrapped it."""
    recorded = runtime_state(module).reshard_after_forward
    return not is_root if recorded is None else recorded
