"""The forwards of modules that free their activations: to recompute them in backward, or with a copy on the host.

``torch.utils.checkpoint`` keeps the results of chosen operators by reference, and detects a later in-place change by
version counters.  ``torch.matmul`` returns ``aten._unsafe_view`` of a product, which shares its memory and not its
counter: ``y = torch.matmul(a, b); y += c`` changes the kept product unnoticed, and the recomputation reads wrong values
(torch 2.11 to 2.15, no upstream issue found).  Here storages are compared.  If an operator writes into the memory of
a kept result, the module's forward runs again without keeping that operator's results, and remembers the operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdp_runtime._torch_compat import TorchDispatchMode, storage_key, tree_leaves, written_arguments
from fsdp_runtime._transformers_compat.models import given_cache, is_cache
from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.activations import BlockActivations, activations_on_host, running_block
from fsdp_runtime.mesh.spec import default_device_type
from fsdp_runtime.model.generators import Generators
from fsdp_runtime.runtime_state import RUNTIME_STATE
from fsdp_runtime.wrap import Wrapper

_unrecorded: ContextVar[bool] = ContextVar("unrecorded", default=False)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Keep no results inside the ``with``, for operators that only one of the two forwards runs, such as a check."""
    token = _unrecorded.set(True)
    try:
        yield
    finally:
        _unrecorded.reset(token)


class SavedTensorWrittenError(Exception):
    """An operator is about to write into the memory of a result; its argument is the result's operator."""


class SelectiveContexts:
    """The ``context_fn`` of one module's selective checkpointing, with the operators that it must not keep."""

    def __init__(self, saved: Sequence[Any]) -> None:
        self.saved = list(saved)

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a forward and of its recomputation."""
        return _contexts(self.saved, watches=True)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Return ``forward()``, repeated as long as it writes into kept results."""
        generators = Generators(default_device_type())
        while True:
            states = generators.get()
            try:
                return forward()
            except SavedTensorWrittenError as error:
                packet = error.args[0].overloadpacket
                self.saved = [operator for operator in self.saved if operator.overloadpacket is not packet]
                generators.set(states)


def contexts_of_compiled(saved: Sequence[Any]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return torch's contexts for a module that is compiled in one graph, else eager contexts."""
    # A module with code that the compiler leaves to Python, such as the code of packed rows, runs its checkpoint there.
    if torch.compiler.is_compiling():
        kept, reused = create_selective_checkpoint_contexts(list(saved))  # type: ignore[no-untyped-call]
        return kept, reused
    return _contexts(saved, watches=False)


def _contexts(
    saved: Sequence[Any], *, watches: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts that keep and reuse results: by torch's modes, or on the host with the block's activations."""
    if (block := running_block()) is not None:
        results = _HostResults(block)
        return results.kept_by(_Only(saved, results.keep, watches=watches)), _Reused(saved, results.reuse)
    kept, reused = create_selective_checkpoint_contexts(list(saved))  # type: ignore[no-untyped-call]
    return _Only(saved, kept.__torch_dispatch__, watches=watches), _Reused(saved, reused.__torch_dispatch__)


class _HostResults:
    """The kept results of one forward: on the device until the forward's end, then on the host."""

    # Results of collectives are complete at that end: other operators have read them.

    def __init__(self, block: BlockActivations) -> None:
        self._block = block
        self._results: dict[Any, list[Any]] = defaultdict(list)

    def keep(self, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self._results[func].append(result)
        return result

    @contextmanager
    def kept_by(self, mode: TorchDispatchMode) -> Iterator[None]:
        """Enter a mode, and copy the results to the host at the end."""
        try:
            with mode:
                yield
        except BaseException:  # the graph of a failed forward holds the results, and they hold it
            self._results.clear()
            raise
        for results in self._results.values():
            results[:] = [_mapped(self._packed, result) for result in results]

    def reuse(self, func: Any, _types: Any, _args: Any, _kwargs: Any) -> Any:
        if not (results := self._results[func]):
            raise RuntimeError(f"the recomputation of a block runs {func} more often than the block's forward did")
        return _mapped(lambda leaf: leaf(), results.pop(0))

    def _packed(self, leaf: Any) -> Callable[[], Any]:
        if not isinstance(leaf, Tensor):
            return lambda: leaf
        return partial(self._block.unpack, self._block.pack(leaf.detach()))


def _mapped(function: Callable[[Any], Any], result: Any) -> Any:
    """Apply a function to an operator's result, or to each element of several results."""
    return type(result)(map(function, result)) if isinstance(result, tuple | list) else function(result)


class _Only(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes the operators with kept results on to a call, which refuses a recomputation with other operators."""

    # FSDP2 gathers the parameters of a part (experts over ``ep``) in one of the two forwards only, if they are already
    # gathered in the other forward. With ``watches``, an operator raises before it writes into a kept result's storage.

    def __init__(self, saved: Iterable[Any], run: Callable[..., Any], *, watches: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved, self.run, self.watches = frozenset(saved), run, watches
        self.storages: dict[int, Any] = {}  # the operators of kept results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _unrecorded.get():
            return func(*args, **kwargs)
        for written in written_arguments(func, args, kwargs) if self.storages else ():
            if (operator := self.storages.get(storage_key(written))) is not None:
                raise SavedTensorWrittenError(operator)
        if func not in self.saved:
            return func(*args, **kwargs)
        result = self.run(func, types, args, kwargs)
        if self.watches:  # the kept result is alive until backward, and so is the key of its storage
            self.storages.update({storage_key(leaf): func for leaf in tree_leaves(result) if isinstance(leaf, Tensor)})
        return result


class _Reused(_Only):  # type: ignore[no-untyped-call]
    """Gives kept results to the first recomputation; another backward (``retain_graph``) recomputes all results."""

    # Each result is freed when it is given. The first recomputation ends with the last tensor that backward reads.
    # Its unused results do not match the start of another recomputation.

    is_first = True

    def __enter__(self) -> Any:
        if not self.is_first:
            self.saved = frozenset()
        self.is_first = False
        return super().__enter__()  # type: ignore[no-untyped-call]


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
