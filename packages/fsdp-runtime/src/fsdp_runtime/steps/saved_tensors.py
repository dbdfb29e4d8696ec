"""Selective checkpointing that never keeps a result if it is later changed in place.

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
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fsdp_runtime._torch_compat import TorchDispatchMode, storage_key, tree_leaves, written_arguments
from fsdp_runtime.memory.activations import BlockActivations, running_block

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
    """An operator is about to write into the memory of a kept result."""

    def __init__(self, operator: Any) -> None:
        super().__init__(str(operator))
        self.operator = operator


class SelectiveContexts:
    """The ``context_fn`` of one module's selective checkpointing, with the operators that it must not keep."""

    def __init__(self, saved: Sequence[Any]) -> None:
        self.saved = list(saved)

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a forward and of its recomputation."""
        kept, reused = _caches(self.saved)
        watched = _both(_Only(self.saved, kept), _WatchWrites(self.saved))
        return _then_to_host(watched, kept), _Reused(self.saved, reused)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Return ``forward()``, repeated as long as it writes into kept results."""
        while True:
            states = _random_states()
            try:
                return forward()
            except SavedTensorWrittenError as error:
                packet = error.operator.overloadpacket
                self.saved = [operator for operator in self.saved if operator.overloadpacket is not packet]
                _restore_random_states(states)


def contexts_of_compiled(saved: Sequence[Any]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return torch's contexts for a module that is compiled in one graph, else eager contexts."""
    # A module with code that the compiler leaves to Python, such as the code of packed rows, runs its checkpoint there.
    if torch.compiler.is_compiling():
        kept, reused = create_selective_checkpoint_contexts(list(saved))  # type: ignore[no-untyped-call]
        return kept, reused
    kept, reused = _caches(saved)
    return _then_to_host(_Only(saved, kept), kept), _Reused(saved, reused)


def _caches(saved: Iterable[Any]) -> tuple[Any, Any]:
    """Return the calls that keep and reuse results: of torch's modes, or on the host with the block's activations."""
    if (block := running_block()) is not None:
        results = _HostResults(block)
        return results.keep, results.reuse
    kept, reused = create_selective_checkpoint_contexts(list(saved))  # type: ignore[no-untyped-call]
    return kept.__torch_dispatch__, reused.__torch_dispatch__


class _HostResults:
    """The kept results of one forward: on the device until the forward's end, then on the host."""

    # Results of collectives are complete at that end: other operators have read them.

    def __init__(self, block: BlockActivations) -> None:
        self._block = block
        self._results: dict[Any, list[Any]] = defaultdict(list)

    def keep(self, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and keep its result."""
        result = func(*args, **kwargs)
        self._results[func].append(result)
        return result

    def to_host(self) -> None:
        """Copy the results to the host."""
        for results in self._results.values():
            results[:] = [_mapped(self._packed, result) for result in results]

    def clear(self) -> None:
        """Forget the results."""
        self._results.clear()

    def reuse(self, func: Any, _types: Any, _args: Any, _kwargs: Any) -> Any:
        """Return the kept result of an operator."""
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


@contextmanager
def _then_to_host(context: AbstractContextManager[Any], keep: Any) -> Iterator[None]:
    results = getattr(keep, "__self__", None)
    try:
        with context:
            yield
    except BaseException:
        if isinstance(results, _HostResults):  # the graph of a failed forward holds the results, and they hold it
            results.clear()
        raise
    if isinstance(results, _HostResults):
        results.to_host()


class _Only(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes the operators with kept results on to a call, which refuses a recomputation with other operators."""

    # FSDP2 gathers the parameters of a part (experts over ``ep``) in one of the two forwards only, if they are already
    # gathered in the other forward.

    def __init__(self, saved: Iterable[Any], run: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved = frozenset(saved)
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.saved and not _unrecorded.get():
            return self.run(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


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


class _WatchWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before an operator writes into the storage of a kept result."""

    def __init__(self, saved: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved = frozenset(saved)
        self.kept: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _unrecorded.get():
            return func(*args, **kwargs)
        if self.kept:
            for written in written_arguments(func, args, kwargs):
                if (operator := self.kept.get(storage_key(written))) is not None:
                    raise SavedTensorWrittenError(operator)
        result = func(*args, **kwargs)
        if func in self.saved:  # the kept result is alive until backward, and so is the key of its storage
            self.kept.update({storage_key(leaf): func for leaf in tree_leaves(result) if isinstance(leaf, Tensor)})
        return result


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _random_states() -> tuple[Tensor, Any]:
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.get_rng_state(), None if device is None else torch.get_device_module(device).get_rng_state()


def _restore_random_states(states: tuple[Tensor, Any]) -> None:
    host, accelerator = states
    torch.set_rng_state(host)
    if accelerator is not None:
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(accelerator)
