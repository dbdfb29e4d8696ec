"""The forward of a model on one stage: absent blocks pass on received tensors, and sent tensors are captured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from fsdp_runtime.steps.pipeline.parts import Call, Run, StagedModel, StagePart
from fsdp_runtime.steps.pipeline.values import Path, Value, at, filled, tensors_in, with_tensor

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

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an own block, and replace another."""
        inputs = [list(args), kwargs]
        if index == 0:  # copies, which model code may change in place; a loss may call the model again
            self.received = {value: tensor.clone() for value, tensor in self.arrived.items()}
        if index < self.first:
            return self._earlier(index, inputs)
        if index >= self.end:
            self._capture(index, "input", inputs)
            return self._later(index, inputs)
        for value in self._received_by(index, "input"):
            with_tensor(inputs, value.path, self.received[value])
        output = call(*inputs[0], **kwargs)
        self.stream = next((tensor for _, tensor in tensors_in(output)), self.stream)
        self._capture(index, "output", output)
        self._capture(index, "entry", inputs)
        return output

    def outer(self, part: StagePart, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of this stage; return zeros for another."""
        runs = part.where == "every" or (self.is_last if part.where == "last" else self.stage == 0)
        return call(*args, **kwargs) if runs else part.zeros(args, kwargs, self.stream)

    def sent(self) -> tuple[Tensor, ...]:
        """Return the tensors for the next stage; received ones may be for a later stage."""
        both = {**self.received, **self.captured}
        return tuple(both[value] for value in self.sending)

    def _earlier(self, index: int, inputs: Any) -> Any:
        stream = next(iter(self.received.values()))

        def received(path: Path) -> Tensor:
            values = (Value(block, "output", path) for block in (index, self.first - 1))
            return next((self.received[value] for value in values if value in self.received), stream)

        entries = {value.path: self.received[value] for value in self._received_by(index, "entry")}
        for top, skeleton in self.staged.entries[index].items():
            below = {path[len(top) :]: tensor for path, tensor in entries.items() if path[: len(top)] == top}
            if below:
                at(inputs, top[:-1])[top[-1]] = filled(skeleton, below.__getitem__)
        return filled(self.staged.skeletons[index], received)

    def _later(self, index: int, inputs: Any) -> Any:
        stream = next(tensor for _, tensor in tensors_in(inputs)).detach()
        return filled(self.staged.skeletons[index], lambda _: stream)

    def _received_by(self, index: int, place: str) -> list[Value]:
        return [value for value in self.received if value.block == index and value.place == place]

    def _capture(self, index: int, place: str, nest: Any) -> None:
        for value in self.sending:
            if value.block == index and value.place == place and value not in self.received:
                self.captured[value] = at(nest, value.path)


@contextmanager
def running(staged: StagedModel, run: Run) -> Iterator[None]:
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
