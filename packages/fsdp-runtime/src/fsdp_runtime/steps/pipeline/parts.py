"""The parts of a model that a stage has or lacks: blocks, and the modules before, between and after the blocks.

Each part has a class mixed in that replaces ``__call__``, ahead of all hooks, of FSDP2 and of compiled code.  So an
absent part costs nothing, and the forward of the model's own class runs on every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.runtime_state import RUNTIME_STATE, runtime_state
from fsdp_runtime.steps.pipeline.values import Value, tensors_in
from fsdp_runtime.wrap import Wrapper, wrap

#: The stages of a module outside of blocks.  ``"every"``: its parameters are on all ranks, and their gradients are
#: summed.
Where = Literal["first", "last", "every"]
#: The output of an absent module: zeros of a table's or a linear layer's width, or zeros like the first input.
Absent = Literal["table", "linear", "like"]

Call = Callable[..., Any]


class Run(Protocol):
    """The treatment of the parts in one forward of the model."""

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or replace a block."""

    def outer(self, part: StagePart, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or replace a module outside of the blocks."""


@dataclass
class StagedModel:
    """The stages of a model: the record on ``runtime_state(model).stages``, shared by all of its parts."""

    run: Run | None = None  # of the forward that is in progress
    ranges: tuple[tuple[int, int], ...] = ()  # of blocks, by stage
    ranks: tuple[int, ...] = ()  # of ``pp``, by stage
    rank: int = 0  # this rank's place on ``pp``
    mesh: Any = None  # the axis ``pp``
    tp: Any = None  # the axis ``tp``, for activations that are sharded over it
    sent: tuple[tuple[Value, ...], ...] = ()  # after each stage but the last
    blocks: tuple[str, ...] = ()  # paths
    outer: dict[str, Where] = field(default_factory=dict)  # by path
    skeletons: tuple[Any, ...] = ()  # of the outputs of blocks
    entries: tuple[dict[Any, Any], ...] = ()  # skeletons of the entries that blocks add, by path
    media: frozenset[str] = frozenset()  # checked keywords of media
    replaced: dict[str, Absent] = field(default_factory=dict)  # outputs of absent outer modules, by path
    shapes: dict[Any, Any] = field(default_factory=dict)  # of sent tensors, by rows and tokens
    varying: dict[Value, tuple[str | None, ...]] = field(default_factory=dict)  # dims of batch and length
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)  # ranks of parameters on several ranks
    unused: frozenset[str] = frozenset()  # parameters without a gradient in the whole copy
    absent: tuple[str, ...] = ()  # parameters that this rank lacks
    state: tuple[StateEntry, ...] = ()  # of the whole model; all tensors are on meta
    checks: list[Callable[[int], None]] = field(default_factory=list)  # of a schedule's number of tokens
    schedules: Any = None  # of the step, with the options of the user

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self.stages_of(self.rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank of ``pp``."""
        return tuple(stage for stage, holder in enumerate(self.ranks) if holder == rank)

    @property
    def blocks_by_stage(self) -> dict[int, tuple[int, int]]:
        """The first and the last block of each stage of this rank."""
        return {stage: (self.ranges[stage][0], self.ranges[stage][1] - 1) for stage in self.stages}

    def __deepcopy__(self, memo: dict[int, Any]) -> StagedModel:
        raise ModelError("a model in pipeline stages cannot be copied: this rank has only its own blocks")


@dataclass
class StagePart:
    """One block, or one module outside of the blocks."""

    staged: StagedModel
    path: str
    block: int | None = None  # its place in the order of calls
    where: Where = "every"
    absent: Absent = "like"
    width: int = 0  # of an absent output
    removed: set[str] = field(default_factory=set)  # names of parameters that this rank lacks

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the forward in progress call or replace the module; outside of a schedule, raise."""
        run = self.staged.run
        if run is None:
            raise ModelError(
                f"{self.path} was called outside of a pipeline schedule, and this rank has only its own blocks: call "
                "forward_backward(model, micro_batches) or forward_only(model, micro_batches) of fsdp_runtime.steps"
            )
        return run.outer(self, call, args, kwargs) if self.block is None else run.block(self.block, call, args, kwargs)

    def zeros(self, args: tuple[Any, ...], kwargs: dict[str, Any], like: Tensor | None) -> Tensor:
        """Return an output of the absent module, without a gradient and with little memory."""
        _, first = next(tensors_in((args, kwargs)))
        if self.absent == "table":
            dtype = None if like is None else like.dtype
            return (first if like is None else like).detach().new_zeros((*first.shape, self.width), dtype=dtype)
        if self.absent == "like":
            return torch.zeros_like(first)
        shape = (*first.shape[:-1], self.width)
        # Logits, which no code reads, take the memory of one number.
        return first.new_zeros(()).expand(shape) if self.where == "last" else first.new_zeros(shape)


class OnStage(Wrapper):
    """Lets the run of a stage call or replace the module."""

    effect = "runs on its pipeline stage"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or replace it."""
        part: StagePart = self.__dict__[RUNTIME_STATE].part
        return part.call(super().__call__, args, kwargs)  # type: ignore[misc]  # mypy: of the module's class


class _OfParameters:
    """The device or dtype of a module's parameters, or of the stream in the forward of a stage where all are absent."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type) -> Any:
        try:
            return getattr(super(OuterOnStage, module), self.name)
        except StopIteration:  # of transformers' property, for a module without parameters
            stream = module.stage_stream
            return getattr(torch.empty(0) if stream is None else stream, self.name)


class OuterOnStage(OnStage):
    """The same for a module outside of blocks; model code may read the dtype or device of its absent parameters."""

    device, dtype = _OfParameters("device"), _OfParameters("dtype")

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]  # of the module's class
        if value is None and name in self.__dict__[RUNTIME_STATE].part.removed:
            return None if self.stage_stream is None else self.stage_stream.new_empty(0)
        return value

    @property
    def stage_stream(self) -> Tensor | None:
        """The hidden states in the forward of a stage that received some."""
        return getattr(self.__dict__[RUNTIME_STATE].part.staged.run, "stream", None)


def add_parts(model: nn.Module, parts: list[StagePart]) -> None:
    """Put the parts' wrapper on their modules."""
    modules = [model.get_submodule(part.path) for part in parts]
    for wrapper, is_block in ((OnStage, True), (OuterOnStage, False)):
        own = (m for m, part in zip(modules, parts, strict=True) if (part.block is not None) is is_block)
        wrap((module for module in own if not isinstance(module, OnStage)), wrapper)
    for module, part in zip(modules, parts, strict=True):
        runtime_state(module).part = part


def outer_modules(model: nn.Module, structure: ModelStructure) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules with parameters that contain no block of the decoder and have a forward."""
    blocks = structure.decoder

    def below(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if inner in blocks:
                continue
            above = any(block.startswith(f"{inner}.") for block in blocks)
            if above or isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield from below(inner, child)
            elif any(True for _ in child.parameters()):
                yield inner, child

    return below("", model)
