"""Record the allocations, collectives and operations of a step, operator by operator, with the running modules."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fsdp_runtime._torch_compat import (
    TorchDispatchMode,
    autograd_position,
    data_dependent_errors,
    local_tensor,
    observe_storage_resizes,
    running_backward_of,
    storage_key,
    tree_leaves,
)
from fsdp_runtime.dry_run.trace.assumed_values import (
    DATA_DEPENDENT,
    GROUPED_MM,
    assume_result,
    grouped_mm,
    remember_origin,
)
from fsdp_runtime.dry_run.trace.fusion import FusedStorage, Fusion
from fsdp_runtime.dry_run.trace.kernels import AttentionKernels, bytes_moved, flops_of, kind_of, workspace_of
from fsdp_runtime.dry_run.types import Assumption, Phase
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.mesh.collectives import CollectiveCall, collective_call


class UntraceableError(EstimateError):
    """An operator's result depends on data, and no result is assumed for it."""

    def __init__(self, operator: str, module: str) -> None:
        super().__init__(operator, module)
        self.operator, self.module = operator, module

    def __str__(self) -> str:
        return (
            f"{self.operator} in {self.module or 'code outside the model'} depends on values, which a dry run does not "
            "have: remove it from the model for the estimate, or give the model as a function that replaces it"
        )


#: Backward nodes of parameters have sequence numbers above every operator's.
_NO_OPERATOR = 2**63
_SUM = torch.ops.aten.add.Tensor

Stream = Literal["compute", "gather", "reduce"]


class OpEvent(NamedTuple):
    """An operator that allocated, with its phase and module."""

    phase: Phase
    module: str
    operator: str


@dataclass
class StorageInfo:
    """Properties of one storage."""

    index: int  # its number in the recording
    created_at: int  # index of the event that created it; -1 for storages that existed before the step
    nbytes: int = 0  # bytes that it has now
    last_dim: int = 0  # last dim of the first tensor on it
    category: str | None = None  # its category, if registered; others follow from lifetimes
    outlives_forward: bool = False  # whether it was alive when forward, or the loss, ended
    stream: Stream = "compute"  # the stream that allocates it
    fused: FusedStorage | None = None  # how a compiler treats it, ``None`` outside of compiled modules


class AllocationEvent(NamedTuple):
    """Bytes that were allocated or, as a negative ``delta``, freed."""

    event: int
    storage: int
    delta: int


class Lap(NamedTuple):
    """Totals of the recording at the end of a phase."""

    phase: Phase
    allocations: int
    collectives: int
    flops: Mapping[str, int]
    bytes_moved: int


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
    laps: list[Lap] = field(default_factory=list)  # in order, also of a phase that is recorded several times


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records operators on local tensors; DTensor operators arrive as their local operators."""

    def __init__(
        self,
        model: nn.Module,
        multiplicity: Callable[[], int],  # equal calls that the running operator represents
        *,
        compiled: Sequence[str],  # paths of compiled modules
        attention: AttentionKernels,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fusion = Fusion(compiled) if compiled else None
        self._attention = attention
        self.recording = Recording()
        self._multiplicity = multiplicity
        self._modules = ModuleTracker(model)
        self._phase: Phase = "forward"
        self._live: dict[int, StorageInfo] = {}  # by storage key
        self._sum: tuple[int, int] | None = None  # the keys of a gradient and of its sum, by the last operator
        self._streams: dict[Any, Stream] = {torch.cpu.current_stream(): "compute"}

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Record the code inside as a phase of the step."""
        self._phase = name
        with observe_storage_resizes(self._resized), self._modules.track(), self:
            yield
        self._end_phase()

    def begin(self, name: Phase) -> None:
        """End the current phase, and record the following code in the same ``with`` as another phase."""
        self._end_phase()
        self._phase = name

    def _end_phase(self) -> None:
        if self._phase in ("forward", "loss"):
            for info in self._live.values():
                info.outlives_forward = True
        record = self.recording
        record.ends[self._phase] = len(record.allocations)
        totals = (len(record.allocations), len(record.collectives), dict(record.flops), record.bytes_moved)
        record.laps.append(Lap(self._phase, *totals))

    def register(self, tensors: Iterable[Tensor], category: str) -> None:
        """Register tensors that exist before the step under a category."""
        for local in map(local_tensor, tensors):
            info = self._live.get(storage_key(local)) or self._allocated(local, -1)
            info.category = category

    def relabel(self, tensors: Iterable[Tensor], category: str) -> None:
        """Set the category of tensors that were created in a phase."""
        for local in map(local_tensor, tensors):
            if (info := self._live.get(storage_key(local))) is not None:
                info.category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        # torchao's tensors in float8 reach their local operators likewise.
        if any(issubclass(kind, DTensor) or kind.__module__.startswith("torchao.") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._fusion is not None:
            read = (self._live.get(storage_key(leaf)) for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            fused = [info.fused for info in read if info is not None and info.fused is not None]
            self._fusion.note(func, self._phase, self._modules.current_path(), fused, len(self.recording.allocations))
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
            try:
                result = func(*args, **kwargs)
            except data_dependent_errors() as error:
                raise UntraceableError(str(func), self._modules.current_path()) from error
            remember_origin(func, args, result)
        if flops := self._multiplicity() * flops_of(func, args, kwargs, result):
            self.recording.flops[kind_of(func)] += flops
        elif func.namespace == "aten" and self._phase not in ("clip", "optimizer"):
            self.recording.bytes_moved += self._multiplicity() * bytes_moved(args, result)
        self._record_results(func, args, result)
        self._sum = None
        if func is _SUM and self._phase == "backward" and not self._modules.running_modules():
            self._sum = storage_key(args[0]), storage_key(result)
        return result

    def _record_results(self, func: Any, args: Any, result: Any) -> None:
        event = None
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.device.type == "meta":
                continue
            if storage_key(leaf) not in self._live:
                event = self._event(str(func)) if event is None else event
                self._allocated(leaf, event)
        if event is not None and (workspace := workspace_of(func, args, self._attention)):
            info = self._new_storage(event, workspace)
            self._changed(info, event, -workspace)

    def _event(self, operator: str) -> int:
        self.recording.events.append(OpEvent(self._phase, self._modules.current_path(), operator))
        return len(self.recording.events) - 1

    def _allocated(self, tensor: Tensor, event: int) -> StorageInfo:
        storage = tensor.untyped_storage()
        info = self._new_storage(event, storage.nbytes())
        info.last_dim = tensor.shape[-1] if tensor.ndim > 1 else 0
        info.fused = self._fusion.created(info.index) if self._fusion is not None and event >= 0 else None
        self._live[storage_key(storage)] = info
        weakref.finalize(storage, _note_freed, weakref.ref(self), storage_key(storage))
        return info

    def _new_storage(self, event: int, nbytes: int) -> StorageInfo:
        info = StorageInfo(len(self.recording.storages), event, stream=self._stream())
        self.recording.storages.append(info)
        self._changed(info, event, nbytes)
        return info

    def _stream(self) -> Stream:
        """Return the kind of the current stream: FSDP2 gathers in forward, and reduces in backward, on its own."""
        # A CPU's streams do nothing, and torch follows the current one as on an accelerator.
        stream = torch.cpu.current_stream()
        return self._streams.setdefault(stream, "gather" if self._phase in ("forward", "loss") else "reduce")

    def _changed(self, info: StorageInfo, event: int, delta: int) -> None:
        info.nbytes += delta
        self.recording.allocations.append(AllocationEvent(event, info.index, delta))

    def _freed(self, key: int) -> None:
        info = self._live.pop(key)
        if self._sum is not None and self._sum[0] == key:
            # Autograd adds up gradients in place if it holds the only reference to one, but not fake tensors: a
            # subclass (``accumulate`` in ``torch/csrc/autograd/input_buffer.cpp``).
            total = self._live[self._sum[1]]
            if self.recording.allocations[-1] == (total.created_at, total.index, info.nbytes):
                self.recording.allocations.pop()
                self._live[self._sum[1]] = info
                return
        self._changed(info, len(self.recording.events) - 1, -info.nbytes)

    def _resized(self, storage: Any) -> None:
        """Record FSDP2's allocation of gathered parameters: it resizes storages without an operator."""
        info = self._live.get(storage_key(storage))
        if info is not None and (change := storage.nbytes() - info.nbytes):
            info.category = "gathered"
            self._changed(info, self._event("resize_"), change)


def _note_freed(recorder: weakref.ref[Recorder], key: int) -> None:
    """Tell a recorder that a storage was freed; a finalizer with the recorder itself would keep its model alive."""
    if (running := recorder()) is not None:
        running._freed(key)


def with_fused_storages(recording: Recording) -> Recording:
    """Return a recording without the fused or recomputed results of compiled modules; see ``fusion``."""
    if all(info.fused is None for info in recording.storages):
        return recording
    moved = _freed_at(recording)
    for index, position in moved.items():
        recording.storages[index].outlives_forward = position >= recording.ends["forward"]
    kept: list[tuple[float, AllocationEvent]] = []
    for position, allocation in enumerate(recording.allocations):
        fused = recording.storages[allocation.storage].fused
        if fused is not None and not fused.materialized:
            continue
        at = moved.get(allocation.storage, float(position)) if allocation.delta < 0 else float(position)
        kept.append((at, allocation))
    kept.sort(key=lambda each: each[0])
    positions = [position for position, _ in kept]
    ends = {phase: bisect_left(positions, end) for phase, end in recording.ends.items()}
    events = [allocation.event for allocation in recording.allocations]
    allocations = [
        each if each.delta > 0 else each._replace(event=events[min(int(position), len(events) - 1)])
        for position, each in kept
    ]
    laps = [lap._replace(allocations=bisect_left(positions, lap.allocations)) for lap in recording.laps]
    return replace(recording, allocations=allocations, ends=ends, laps=laps)


def _freed_at(recording: Recording) -> dict[int, float]:
    """Return new free positions of storages that compiled modules free earlier, or later, than the trace."""
    # FSDP2 resizes gathered parameters: these are allocated more than once, and stay as they are.
    times = Counter(each.storage for each in recording.allocations if each.delta > 0)
    freed = {
        each.storage: position
        for position, each in enumerate(recording.allocations)
        if each.delta < 0 and times[each.storage] == 1
    }
    positions: dict[int, float] = {}
    later: dict[int, float] = {}
    for info in recording.storages:
        fused = info.fused
        if fused is None or fused.index not in freed or not fused.recomputed or not fused.read_elsewhere:
            continue
        positions[fused.index] = fused.last_read + 0.5
        for source in _sources(fused):
            later[source.index] = max(later.get(source.index, 0.0), freed[fused.index] + 0.5)
    for index, position in later.items():
        if index in freed and position > positions.get(index, freed[index]):
            positions[index] = position
    return positions


def _sources(fused: FusedStorage) -> Iterator[FusedStorage]:
    """Yield the storages from which a value is computed again."""
    waiting, seen = list(fused.sources), set[int]()
    while waiting:
        source = waiting.pop()
        if source.index in seen:
            continue
        seen.add(source.index)
        if source.recomputed:
            waiting += source.sources
        else:
            yield source


class ModuleTracker:
    """Track running modules; backward is attributed by the sequence numbers that autograd assigns in forward."""

    # ``torch.utils.module_tracker`` uses gradient hooks instead, which change the graph and extend lifetimes, so that
    # memory would be counted wrongly.

    def __init__(self, model: nn.Module) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._modules = {path: module for module, path in self._paths.items()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._path_at_start: list[str] = []
        self._last_backward = ""

    @contextmanager
    def track(self) -> Iterator[None]:
        """Track modules that run inside."""
        entering = register_module_forward_pre_hook(self._enter)
        with entering, register_module_forward_hook(self._leave, always_call=True):
            yield

    def current_path(self) -> str:
        """Return the path of the innermost module in forward or backward; ``""`` outside."""
        if self._stack:
            return self._stack[-1]
        number = running_backward_of()
        if number is None:
            return ""
        if number >= _NO_OPERATOR:
            return self._last_backward
        index = bisect_right(self._starts, number) - 1
        self._last_backward = self._path_at_start[index] if index >= 0 else ""
        return self._last_backward

    def running_modules(self) -> Sequence[nn.Module]:
        """Return the modules in forward, outermost first."""
        return [self._modules[path] for path in self._stack]

    def _enter(self, module: nn.Module, _args: Any) -> None:
        path = self._paths.get(module)
        self._stack.append(self._stack[-1] if path is None and self._stack else path or "")
        self._note_start()

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._stack.pop()
        self._note_start()

    def _note_start(self) -> None:
        self._starts.append(autograd_position())
        self._path_at_start.append(self._stack[-1] if self._stack else "")
