"""The forwards of modules that free their activations: to recompute them in backward, or with a copy on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_runtime._transformers_compat.models import given_cache, is_cache
from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.activations import activations_on_host
from fsdp_runtime.runtime_state import RUNTIME_STATE
from fsdp_runtime.steps.saved_tensors import SelectiveContexts, contexts_of_compiled
from fsdp_runtime.wrap import Wrapper


def recomputes(module: nn.Module) -> bool:
    """Return True if ``ActivationCheckpointing`` made the module recompute its activations."""
    return isinstance(module, Recomputing)


class Recomputing(Wrapper):
    """Frees the activations of a module after its forward, and runs the forward again in backward."""

    effect = "recomputed in backward"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward under ``torch.utils.checkpoint`` where gradients are computed."""
        forward = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if given_cache(kwargs) is not None or any(map(is_cache, (*args, *kwargs.values()))):
            raise ModelError(
                f"{type(self).__name__} recomputes its activations but was given a key/value cache, which "
                "recomputation would fill twice: pass use_cache=False; a model that makes a cache in every forward, "
                'as XLM does, needs activation_checkpointing="none"'
            )
        state = self.__dict__[RUNTIME_STATE]
        if not torch.compiler.is_compiling() or state.recomputes_in_python:
            return _recompute_in_python(forward, state, self, args, kwargs)
        contexts: SelectiveContexts | None = state.checkpoint_contexts
        if contexts is None:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        # The compiler replaces in-place operators before it decides what to keep.
        compiled_contexts = partial(contexts_of_compiled, contexts.saved)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=compiled_contexts, **kwargs)


@partial(torch.compiler.disable, recursive=False)  # the functions that the module calls are compiled
def _recompute_in_python(forward: Any, state: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    # Before backward another batch may run forward, and ties in a router's scores may resolve differently: the forward
    # is bound to the current documents and routes.
    for carried in state.carried:  # a graph keeps its own values
        forward = carried.bind(module, forward)
    forward, args, kwargs = _by_position(forward, args, kwargs)
    contexts: SelectiveContexts | None = state.checkpoint_contexts
    if contexts is None:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return contexts.run(partial(checkpoint, forward, *args, use_reentrant=False, context_fn=contexts, **kwargs))


def _by_position(forward: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return a call with activations by position: torch saves these for backward, and holds keywords in a closure."""
    moved = {name: value for name, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad}
    if not moved:
        return forward, args, kwargs
    names, count = tuple(moved), len(args)

    def call(*args: Any, **others: Any) -> Any:
        return forward(*args[:count], **dict(zip(names, args[count:], strict=True)), **others)

    return call, (*args, *moved.values()), {name: value for name, value in kwargs.items() if name not in moved}


class Offloading(Wrapper):
    """Keeps the tensors that a block saves for backward on the host; outside of the block's compiled code."""

    effect = "activations on the host until backward"

    @partial(torch.compiler.disable, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its hooks, which gather and free its parameters."""
        call = super().__call__  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with activations_on_host(self, (args, kwargs), self.__dict__[RUNTIME_STATE].activations):  # type: ignore[arg-type]  # a module
            return call(*args, **kwargs)
