"""The one record that this package keeps on a module of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

#: The key in ``module.__dict__``; not a parameter, buffer or child, so state dicts do not contain it.
RUNTIME_STATE = "_fsdp_runtime_state"


@dataclass
class RuntimeState:
    """Settings and flags of one module.

    Args:
        reshard_after_forward: the value that ``FSDP2`` gave the FSDP module; ``None`` where other code wrapped it.
        is_fsdp_root: ``FSDP2`` made the module the root of its FSDP modules.
        checkpoint_contexts: the ``context_fn`` of ``torch.utils.checkpoint`` for selective checkpointing, or ``None``.
        compiled: of a block that runs in Python while its outputs are recorded, its compiled call.
        recomputes_in_python: the module recomputes outside of compiled graphs.
        carried: state of a forward that its recomputation takes from it.
        fsdp_module: the FSDP module that gathers the module's own parameters.
        versions: of an FSDP module, those of the shards that the root's last forward left copies of; ``None`` for fresh
            copies, which ``unsharded`` has gathered.
        unsharded: set inside :func:`fsdp_runtime.unsharded`: ``True`` for a module that is kept gathered, ``False`` for
            one that ``max_bytes`` excludes; ``None`` outside.
        no_sync: the module is inside :func:`fsdp_runtime.no_sync`.
        offloaded: of a model, the host copies that :func:`fsdp_runtime.offload` made, or ``None``.
        watches: of a router, how many sessions and recomputations read its selection at present.
        hook_effects: what the hooks around its forward do.
        gathered: of a model under context parallelism, its attention and the modules that run on full sequences.
        routers: of a model whose routes were recorded or replayed, its routers.
        one_rank: ``parallelize`` was given a mesh of this rank alone, so that no other rank has part of the model.
    """

    reshard_after_forward: bool | None = None
    is_fsdp_root: bool = False
    checkpoint_contexts: Callable[[], Any] | None = None
    compiled: Any = None
    recomputes_in_python: bool = False
    carried: tuple[Any, ...] = ()
    fsdp_module: Any = None
    versions: tuple[int, ...] | None = ()
    unsharded: bool | None = None
    no_sync: bool = False
    offloaded: Any = None
    watches: int = 0
    hook_effects: list[str] = field(default_factory=list)
    gathered: Any = None
    routers: Any = None
    one_rank: bool = False


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
