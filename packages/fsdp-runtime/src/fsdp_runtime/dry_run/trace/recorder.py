"""Record the allocations, collectives and operations of a step, operator by operator."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import (
    TorchDispatchMode,
    data_dependent_errors,
    local_tensor,
    observe_storage_resizes,
    storage_key,
    tree_leaves,
)
from fsdp_runtime.dry_run.trace.data_dependent_ops import (
    DATA_DEPENDENT,
    GROUPED_MM,
    assume_result,
    grouped_mm,
    remember_origin,
)
from fsdp_runtime.dry_run.trace.fusion import FusedStorage, Fusion
from fsdp_runtime.dry_run.trace.kernels import (
    AttentionKernels,
    attention_workspace,
    bytes_moved,
    flops_of,
    kind_of,
    storages_on_streams,
)
from fsdp_runtime.dry_run.trace.module_tracker import ModuleTracker
from fsdp_runtime.dry_run.types import Assumption, Phase
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.mesh.collectives import CollectiveCall, collective_call


class UntraceableError(EstimateError):
    """An operator's result depends on data, and no result is assumed for it."""

    def __init__(self, operator: str, module: str) -> None:
        super().__init__(
            f"{operator} in {module or 'code outside the model'} depends on values, which a dry run does not have: "
            "remove it from the model for the estimate, or give the model as a function that replaces it"
        )
        self.operator, self.module = operator, module


Stream = Literal["compute", "gather", "reduce"]


class OpEvent(NamedTuple):
    """An operator that allocated, with its phase and module."""

    phase: Phase
    module: str
    operator: str


@dataclass
class StorageInfo:
    """Properties of one storage."""

    created_at: int  # index of the event that created it; -1 for storages that existed before the step
    last_dim: int = 0  # last dim of the first tensor on it
    category: str | None = None  # its category, if registered; others follow from lifetimes
    outlives_forward: bool = False  # whether it was alive when forward, or the loss, ended
    stream: Stream = "compute"  # the stream that allocates it: FSDP2 gathers and reduces on streams of its own
    fused: FusedStorage | None = None  # how a compiler treats it, ``None`` outside of compiled modules


class AllocationEvent(NamedTuple):
    """Bytes that were allocated or, as a negative ``delta``, freed."""

    event: int
    storage: int
    delta: int


@dataclass
class Recording:
    """Everything that was recorded, in order."""

    events: list[OpEvent] = field(default_factory=list)  # operators that allocated
    storages: list[StorageInfo] = field(default_factory=list)  # every storage that was seen
    allocations: list[AllocationEvent] = field(default_factory=list)  # bytes allocated and freed
    ends: dict[Phase, int] = field(default_factory=dict)  # number of allocations at the end of each phase
    collectives: list[tuple[Phase, CollectiveCall]] = field(default_factory=list)  # calls with their phases
    flops: Counter[str] = field(default_factory=Counter)  # floating-point operations by kind
    bytes_moved: int = 0  # bytes that operators without any read and write in forward and backward
    assumptions: dict[Assumption, None] = field(default_factory=dict)  # of results that depend on data, once


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records operators on local tensors; DTensor operators arrive as the local ones they call."""

    def __init__(
        self,
        modules: ModuleTracker,
        multiplicity: Callable[[], int] = lambda: 1,  # equal calls for which the running operator stands
        *,
        compiled: Sequence[str] = (),
        attention: AttentionKernels = "flash2",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fusion = Fusion(compiled) if compiled else None
        self._attention = attention
        self.recording = Recording()
        self._multiplicity = multiplicity
        self._modules = modules
        self._phase: Phase = "forward"
        self._live: dict[int, tuple[int, int]] = {}  # storage key -> index in storages, bytes

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Record the code inside as a phase of the step."""
        self._phase = name
        with observe_storage_resizes(self._resized), self._modules.track(), self:
            yield
        self._end_phase()

    def begin(self, name: Phase) -> None:
        """End the phase of the code that runs, and record what follows in the same ``with`` as another."""
        self._end_phase()
        self._phase = name

    def _end_phase(self) -> None:
        if self._phase in ("forward", "loss"):
            for index, _ in self._live.values():
                self.recording.storages[index].outlives_forward = True
        self.recording.ends[self._phase] = len(self.recording.allocations)

    def register(self, tensors: Iterable[Tensor], category: str) -> None:
        """Register tensors that exist before the step under a category."""
        for local in map(local_tensor, tensors):
            key = storage_key(local)
            if key not in self._live:
                self._allocated(local, -1)
            self.recording.storages[self._live[key][0]].category = category

    def relabel(self, tensors: Iterable[Tensor], category: str) -> None:
        """Set the category of tensors that were created in a phase."""
        for local in map(local_tensor, tensors):
            if (live := self._live.get(storage_key(local))) is not None:
                self.recording.storages[live[0]].category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        self._note_arguments(func, args)
        if (call := collective_call(func, args, kwargs)) is not None:
            self.recording.collectives.append((self._phase, call))
        if func in DATA_DEPENDENT:
            running = self._modules.running_modules()
            result, text = assume_result(func, args[0], running)
            if running:  # checks of loss and optimizer (valid targets, step number) are not listed
                path = self._modules.current_path()
                self.recording.assumptions[Assumption(operator=str(func), module=path, assumption=text)] = None
        elif func in GROUPED_MM and args[0].dtype != torch.bfloat16:
            result = grouped_mm(*args, **kwargs)
        else:
            result = self._run(func, args, kwargs)
            remember_origin(func, args, result)
        self._count(func, args, kwargs, result)
        self._record_results(func, args, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count operations, and bytes of operators that have none."""
        if flops := self._multiplicity() * flops_of(func, args, kwargs, result):
            self.recording.flops[kind_of(func)] += flops
        elif func.namespace == "aten" and self._phase not in ("clip", "optimizer"):
            self.recording.bytes_moved += self._multiplicity() * bytes_moved(args, result)

    def _note_arguments(self, func: Any, args: Any) -> None:
        """Note the streams of communication buffers, and what reads a compiled module's storages."""
        for tensor, stream in storages_on_streams(func, args):
            if (live := self._live.get(storage_key(tensor))) is not None and live[1]:
                info = self.recording.storages[live[0]]
                if info.category is None:
                    info.stream = stream
        if self._fusion is not None:
            read = (self._live.get(storage_key(leaf)) for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            infos = [self.recording.storages[live[0]] for live in read if live is not None]
            fused, position = [info.fused for info in infos if info.fused], len(self.recording.allocations)
            self._fusion.note(func, self._phase, self._modules.current_path(), fused, position)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except data_dependent_errors() as error:
            raise UntraceableError(str(func), self._modules.current_path()) from error

    def _record_results(self, func: Any, args: Any, result: Any) -> None:
        event = None
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.device.type == "meta":
                continue
            if storage_key(leaf) not in self._live:
                event = self._event(str(func)) if event is None else event
                self._allocated(leaf, event)
        if event is not None and (workspace := attention_workspace(func, args, self._attention)):
            self.recording.storages.append(StorageInfo(event))
            index = len(self.recording.storages) - 1
            self.recording.allocations.append(AllocationEvent(event, index, workspace))
            self.recording.allocations.append(AllocationEvent(event, index, -workspace))

    def _event(self, operator: str) -> int:
        self.recording.events.append(OpEvent(self._phase, self._modules.current_path(), operator))
        return len(self.recording.events) - 1

    def _allocated(self, tensor: Tensor, event: int) -> None:
        storage = tensor.untyped_storage()
        index, size = len(self.recording.storages), storage.nbytes()
        fused = self._fusion.created(index) if self._fusion is not None and event >= 0 else None
        info = StorageInfo(event, tensor.shape[-1] if tensor.ndim > 1 else 0, fused=fused)
        self.recording.storages.append(info)
        self.recording.allocations.append(AllocationEvent(event, index, size))
        self._live[storage_key(storage)] = (index, size)
        weakref.finalize(storage, self._freed, storage_key(storage))

    def _freed(self, key: int) -> None:
        index, size = self._live.pop(key)
        self.recording.allocations.append(AllocationEvent(len(self.recording.events) - 1, index, -size))

    def _resized(self, storage: Any) -> None:
        """Record FSDP2's allocation of gathered parameters: it resizes storages, and no operator shows that."""
        if (live := self._live.get(storage_key(storage))) is None:
            return
        index, before = live
        if (size := storage.nbytes()) != before:
            self.recording.storages[index].category = "gathered"
            self.recording.allocations.append(AllocationEvent(self._event("resize_"), index, size - before))
            self._live[storage_key(storage)] = (index, size)
