"""The forward of a model on one stage: its parts, the tensors between stages, and the run that treats the parts.

Parts are blocks, and the modules before, between and after the blocks.  Each part has a class mixed in that replaces
``__call__``, ahead of all hooks, of FSDP2 and of compiled code.  So an absent part costs nothing, and the forward of
the model's own class runs on every stage: absent blocks pass on received tensors, and sent tensors are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.runtime_state import RUNTIME_STATE, runtime_state
from fsdp_runtime.steps.pipeline.values import Path, Place, Value, at, filled, tensors_in, with_tensor
from fsdp_runtime.wrap import Wrapper, wrap

#: The stages of a module outside of blocks.  ``"every"``: its parameters are on all ranks, and their gradients are
#: summed.
Where = Literal["first", "last", "every"]
#: The output of an absent module: zeros of a table's or a linear layer's width, or zeros like the first input.
Absent = Literal["table", "linear", "like"]

Call = Callable[..., Any]
#: A list of the positional arguments, and the keywords.
Inputs = Any


@dataclass
class StagedModel:
    """The stages of a model: the record on ``runtime_state(model).stages``, shared by all of its parts."""

    run: Any = None  # of the forward that is in progress: its ``block`` and ``outer`` call or replace the parts
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

    def zeros(self, inputs: Inputs, like: Tensor | None) -> Tensor:
        """Return an output of the absent module, without a gradient and with little memory."""
        _, first = next(tensors_in(inputs))
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
        """Let the forward in progress call or replace the module; outside of a schedule, raise."""
        part: StagePart = self.__dict__[RUNTIME_STATE].part
        call, inputs = super().__call__, [list(args), kwargs]  # type: ignore[misc]  # mypy: of the module's class
        if (run := part.staged.run) is None:
            raise ModelError(
                f"{part.path} was called outside of a pipeline schedule, and this rank has only its own blocks: call "
                "forward_backward(model, micro_batches) or forward_only(model, micro_batches) of fsdp_runtime.steps"
            )
        return run.outer(part, call, inputs) if part.block is None else run.block(part.block, call, inputs)


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


#: The attribute with the width of an absent module's output.
_WIDTHS = {"table": "embedding_dim", "linear": "out_features"}


def add_parts(model: nn.Module, staged: StagedModel) -> None:
    """Put the wrapper of the parts on the model's blocks and outer modules."""
    parts = [StagePart(staged, path, block=index) for index, path in enumerate(staged.blocks)]
    for path, where in staged.outer.items():
        absent = staged.replaced[path]
        width = getattr(model.get_submodule(path), _WIDTHS.get(absent, ""), None)
        parts.append(StagePart(staged, path, where=where, absent=absent, width=width if isinstance(width, int) else 0))
    for part in parts:
        module = model.get_submodule(part.path)
        if not isinstance(module, OnStage):
            wrap([module], OuterOnStage if part.block is None else OnStage)
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


#: Parts of the names of keywords of media.
_MEDIA = ("pixel", "image", "video", "audio", "speech", "input_features", "input_values")
#: Keywords and config entries for outputs of all blocks.
RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")


class Tokens(NamedTuple):
    """The place of a micro-batch among the tokens of a schedule."""

    micro_batch: int
    start: int
    number: int


class StageRun:
    """One forward of a stage, from its received tensors to its sent ones."""

    def __init__(
        self, staged: StagedModel, stage: int, received: Mapping[Value, Tensor], tokens: Tokens | None = None
    ) -> None:
        self.staged, self.stage, self.received, self.tokens = staged, stage, received, tokens
        self.arrived = received
        self.first, self.end = staged.ranges[stage]
        self.captured: dict[Value, Tensor] = {}
        self.is_last = stage == len(staged.ranges) - 1
        self.sending = () if self.is_last else staged.sent[stage]
        self.stream = next(iter(received.values()), None)

    def block(self, index: int, call: Call, inputs: Inputs) -> Any:
        """Run an own block, and replace another."""
        if index == 0:  # copies, which model code may change in place; a loss may call the model again
            self.received = {value: tensor.clone() for value, tensor in self.arrived.items()}
        if index < self.first:
            return self._earlier(index, inputs)
        if index >= self.end:
            self._capture(index, "input", inputs)
            stream = next(tensor for _, tensor in tensors_in(inputs)).detach()
            return filled(self.staged.skeletons[index], lambda _: stream)
        for value in self.received_by(index, "input"):
            with_tensor(inputs, value.path, self.received[value])
        output = call(*inputs[0], **inputs[1])
        self.stream = next((tensor for _, tensor in tensors_in(output)), self.stream)
        self._capture(index, "output", output)
        self._capture(index, "entry", inputs)
        return output

    def outer(self, part: StagePart, call: Call, inputs: Inputs) -> Any:
        """Run a module of this stage; return zeros for another."""
        runs = part.where == "every" or (self.is_last if part.where == "last" else self.stage == 0)
        return call(*inputs[0], **inputs[1]) if runs else part.zeros(inputs, self.stream)

    def sent(self) -> tuple[Tensor, ...]:
        """Return the tensors for the next stage; received ones may be for a later stage."""
        both = {**self.received, **self.captured}
        return tuple(both[value] for value in self.sending)

    def _earlier(self, index: int, inputs: Any) -> Any:
        stream = next(iter(self.received.values()))

        def received(path: Path) -> Tensor:
            values = (Value(block, "output", path) for block in (index, self.first - 1))
            return next((self.received[value] for value in values if value in self.received), stream)

        entries = {value.path: self.received[value] for value in self.received_by(index, "entry")}
        for top, skeleton in self.staged.entries[index].items():
            below = {path[len(top) :]: tensor for path, tensor in entries.items() if path[: len(top)] == top}
            if below:
                at(inputs, top[:-1])[top[-1]] = filled(skeleton, below.__getitem__)
        return filled(self.staged.skeletons[index], received)

    def received_by(self, index: int, place: Place) -> list[Value]:
        """Return the received values at a place of a block."""
        return [value for value in self.received if value.block == index and value.place == place]

    def _capture(self, index: int, place: str, nest: Any) -> None:
        for value in self.sending:
            if value.block == index and value.place == place and value not in self.received:
                self.captured[value] = at(nest, value.path)


@contextmanager
def running(staged: StagedModel, run: Any) -> Iterator[None]:
    """Let a run treat the parts of the model inside the ``with``."""
    staged.run = run
    try:
        yield
    finally:
        staged.run = None


def media_names(keywords: Iterable[str]) -> list[str]:
    """Return the keywords of media, with their sizes, positions and masks."""
    return [name for name in keywords if any(part in name for part in _MEDIA)]


def media_of(inputs: Mapping[str, Any]) -> list[str]:
    """Return the keywords with pixels and samples, which the first stage alone gets."""
    floats = {path[0] for path, tensor in tensors_in(inputs) if tensor.is_floating_point()}
    return [name for name in media_names(inputs) if name in floats or name == "audio_input_ids"]  # sound in codes


def stage_inputs(inputs: Mapping[str, Any], stage: int, stages: int) -> dict[str, Any]:
    """Return the keywords of the model's forward on a stage: media for the first stage, labels for the last."""
    dropped = [*(["labels"] if stage < stages - 1 else []), *(media_of(inputs) if stage else [])]
    return {**{name: value for name, value in inputs.items() if name not in dropped}, "use_cache": False}
