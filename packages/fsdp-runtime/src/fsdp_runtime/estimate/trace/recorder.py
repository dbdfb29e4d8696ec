"""Records what a step allocates, frees, communicates and computes, operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import TorchDispatchMode, leaves, local_of, storage_key, untraceable
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.estimate.trace.collectives import Collective, collective_of
from fsdp_runtime.estimate.trace.data_dependent_ops import (
    DATA_DEPENDENT,
    GROUPED,
    grouped_product,
    remember_origin,
    substitute,
)
from fsdp_runtime.estimate.trace.flops import flops_of
from fsdp_runtime.estimate.trace.module_tracker import Places
from fsdp_runtime.estimate.types import Phase


class UntraceableError(EstimateError):
    """An operator whose result depends on data, and for which nothing is assumed."""

    def __init__(self, operator: str, module: str) -> None:
        super().__init__(
            f"{operator} in {module or 'code outside the model'} depends on values, which a dry run has not: take it "
            "out of the model for the estimate, or give the model as a function that replaces it"
        )
        self.operator, self.module = operator, module


class Moment(NamedTuple):
    """An operator that allocated: where it ran."""

    phase: Phase | None
    module: str
    operator: str


@dataclass
class Stored:
    """What is known of one storage.

    Args:
        born: the moment at which it was made; -1 for what was there before.
        last_dim: of the first tensor on it.
        category: what it is, where that is known; of all others it follows from when they lived.
        outlives_forward: whether it was alive when forward, or the loss, ended.
    """

    born: int
    last_dim: int = 0
    category: str | None = None
    outlives_forward: bool = False


class Change(NamedTuple):
    """Bytes that came or went."""

    moment: int
    storage: int
    delta: int


@dataclass
class Recording:
    """What happened, in order.

    Args:
        moments: operators that allocated.
        stored: every storage that was seen.
        changes: bytes that came or went.
        ends: by phase, how many changes there were at its end.
        collectives: calls, with their phases.
        flops: floating-point operations.
        assumed: ``(operator, module, assumption)`` of results that depend on data, with repetitions left out.
    """

    moments: list[Moment] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    ends: dict[Phase, int] = field(default_factory=dict)
    collectives: list[tuple[Phase, Collective]] = field(default_factory=list)
    flops: int = 0
    assumed: dict[tuple[str, str, str], None] = field(default_factory=dict)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records local operators: those of DTensors come here afterwards, as what they are made of."""

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._places = places
        self._phase: Phase | None = None
        self._live: dict[int, tuple[int, int]] = {}  # by storage: its number, and its bytes

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Record what runs inside as a phase of the step."""
        self._phase = name
        with _resizes_reported(self._resized), self._places.followed(), self:
            yield
        if name in ("forward", "loss"):
            for number, _ in self._live.values():
                self.recording.stored[number].outlives_forward = True
        self.recording.ends[name] = len(self.recording.changes)
        self._phase = None

    def adopt(self, tensors: Iterable[Tensor], category: str) -> None:
        """Take tensors that are there, outside of every phase, as a category."""
        for local in map(local_of, tensors):
            key = storage_key(local)
            if key not in self._live:
                self._made(local, -1)
            self.recording.stored[self._live[key][0]].category = category

    def relabel(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what tensors are that were made in a phase."""
        for local in map(local_of, tensors):
            if (live := self._live.get(storage_key(local))) is not None:
                self.recording.stored[live[0]].category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it did."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        assert self._phase is not None  # noqa: S101  # the mode is entered by phase()
        kwargs = kwargs or {}
        if (call := collective_of(func, args, kwargs)) is not None:
            self.recording.collectives.append((self._phase, call))
        if func in DATA_DEPENDENT:
            result, told = substitute(func, args[0], self._places.running())
            if self._places.running():  # what loss and optimizer ask is whether targets are valid, which step it is
                self.recording.assumed[str(func), self._places.now(), told] = None
        elif func in GROUPED and args[0].dtype != torch.bfloat16:
            result = grouped_product(*args, **kwargs)
        else:
            result = self._run(func, args, kwargs)
            remember_origin(func, args, result)
        self.recording.flops += flops_of(func, args, kwargs, result)
        self._note_results(func, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except untraceable() as error:
            raise UntraceableError(str(func), self._places.now()) from error

    def _note_results(self, func: Any, result: Any) -> None:
        moment = None
        for leaf in leaves(result):
            if not isinstance(leaf, Tensor) or leaf.device.type == "meta":
                continue
            if storage_key(leaf) not in self._live:
                moment = self._moment(str(func)) if moment is None else moment
                self._made(leaf, moment)

    def _moment(self, operator: str) -> int:
        self.recording.moments.append(Moment(self._phase, self._places.now(), operator))
        return len(self.recording.moments) - 1

    def _made(self, tensor: Tensor, moment: int) -> None:
        storage = tensor.untyped_storage()
        number, size = len(self.recording.stored), storage.nbytes()
        self.recording.stored.append(Stored(moment, tensor.shape[-1] if tensor.ndim > 1 else 0))
        self.recording.changes.append(Change(moment, number, size))
        self._live[storage_key(storage)] = (number, size)
        weakref.finalize(storage, self._freed, storage_key(storage))

    def _freed(self, key: int) -> None:
        number, size = self._live.pop(key)
        self.recording.changes.append(Change(len(self.recording.moments) - 1, number, -size))

    def _resized(self, storage: Any) -> None:
        """FSDP2 frees and allocates what it gathers into by resizing storages, which no operator tells."""
        if (live := self._live.get(storage_key(storage))) is None:
            return
        number, before = live
        if (size := storage.nbytes()) != before:
            self.recording.stored[number].category = "gathered"
            self.recording.changes.append(Change(self._moment("resize_"), number, size - before))
            self._live[storage_key(storage)] = (number, size)


@contextmanager
def _resizes_reported(report: Any) -> Iterator[None]:
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = original(storage, size)
        report(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
