"""Find the tensors that cross stages: run a small copy whole, then its code around the blocks on each stage.

The second run replaces every block by its recorded outputs.  An input of a block that then differs from the record
depends on an absent part, so the stage has to receive it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime.errors import ModelError
from fsdp_runtime.steps.pipeline.parts import Absent, Call, StagedModel, StagePart, Where
from fsdp_runtime.steps.pipeline.runs import StageRun, running, stage_inputs
from fsdp_runtime.steps.pipeline.values import Path, Place, Value, at, filled, skeleton_of, tensors_in, with_tensor


@dataclass
class BlockCall:
    """The tensors of one call of a block."""

    inputs: dict[Path, Tensor]  # copies: model code may change its tensors in place
    given: dict[Path, Tensor]  # the inputs themselves
    outputs: dict[Value, Tensor]  # copies of the tensors of the output and of the entries
    produced: dict[Value, Tensor]  # these tensors themselves
    skeleton: Any
    entries: dict[Path, Any]  # skeletons of the values that the block added to its dicts and lists, by path

    def again(self, index: int, inputs: Any) -> Any:
        """Add the recorded entries to the arguments, and return the recorded output."""
        for top, skeleton in self.entries.items():
            at(inputs, top[:-1])[top[-1]] = filled(skeleton, partial(self._copy, index, "entry", top))
        return filled(self.skeleton, partial(self._copy, index, "output", ()))

    def _copy(self, index: int, place: Place, top: Path, path: Path) -> Tensor:
        return self.outputs[Value(index, place, (*top, *path))].clone()


@dataclass
class Record:
    """A forward of the whole copy."""

    calls: list[BlockCall] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    times: dict[str, set[int]] = field(default_factory=dict)  # finished blocks at each call of an outer module
    absent: dict[str, Absent | None] = field(default_factory=dict)
    output: Any = None

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block, and record its inputs, its outputs and the entries that it adds to containers."""
        inputs = [list(args), kwargs]
        before = {path: id(part) for path, part in _entries(inputs)}
        tensors = dict(tensors_in(inputs))
        copies = {path: tensor.clone() for path, tensor in tensors.items()}
        output = call(*inputs[0], **kwargs)
        entries = {path: part for path, part in _entries(inputs) if before.get(path) != id(part)}
        produced = {Value(index, "output", path): tensor for path, tensor in tensors_in(output)}
        for top, part in entries.items():
            produced |= {Value(index, "entry", (*top, *path)): tensor for path, tensor in tensors_in(part)}
        self.calls.append(
            BlockCall(
                inputs=copies,
                given=tensors,
                outputs={value: tensor.clone() for value, tensor in produced.items()},
                produced=produced,
                skeleton=skeleton_of(output),
                entries={path: skeleton_of(part) for path, part in entries.items()},
            )
        )
        self.order.append(index)
        return output

    def outer(self, part: StagePart, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module outside of the blocks, and record when, and how its output relates to its input."""
        output = call(*args, **kwargs)
        self.times.setdefault(part.path, set()).add(len(self.calls))
        self.absent[part.path] = _absent(part, (args, kwargs), output)
        return output

    def values(self, end: int) -> dict[int, Value]:
        """Return the outputs and entries of the first blocks by the identity of their tensor; the last one wins."""
        return {id(tensor): value for call in self.calls[:end] for value, tensor in call.produced.items()}

    def tensor(self, value: Value) -> Tensor:
        """Return a recorded tensor."""
        call = self.calls[value.block]
        return call.inputs[value.path] if value.place == "input" else call.outputs[value]


def _entries(inputs: Any) -> list[tuple[Path, Any]]:
    """Return the parts of the dicts and lists among a block's arguments."""
    containers = [((0, index), value) for index, value in enumerate(inputs[0])]
    containers += [((1, name), value) for name, value in inputs[1].items()]
    entries: list[tuple[Path, Any]] = []
    for path, value in containers:
        items = (
            value.items() if isinstance(value, MutableMapping) else enumerate(value) if isinstance(value, list) else ()
        )
        entries += [((*path, key), part) for key, part in items]
    return entries


def _absent(part: StagePart, inputs: Any, output: Any) -> Absent | None:
    """Return the kind of output that replaces a module's where it is absent; ``None`` if there is none."""
    first = next((tensor for _, tensor in tensors_in(inputs)), None)
    if first is None or not isinstance(output, Tensor):
        return None
    if not first.is_floating_point():
        return "table" if output.shape[:-1] == first.shape else None
    if output.shape == first.shape:
        return "like"
    return "linear" if output.shape[:-1] == first.shape[:-1] else None


class RecordedBlocks:
    """A run of the code around the blocks from one stage on: blocks return their recorded outputs."""

    def __init__(self, record: Record, run: StageRun) -> None:
        self.record, self.run = record, run
        self.differing: list[Value] = []

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compare the inputs of a block with the record, and return the recorded outputs."""
        if index < self.run.first:
            return self.run.block(index, call, args, kwargs)
        inputs, recorded = [list(args), kwargs], self.record.calls[index]
        for value, tensor in self.run.received.items():
            if value.block == index and value.place == "input":
                with_tensor(inputs, value.path, tensor)
        tensors = dict(tensors_in(inputs))
        for path, expected in recorded.inputs.items():
            if not _equal(tensors.get(path), expected):
                self.differing.append(Value(index, "input", path))
        return recorded.again(index, inputs)

    def outer(self, part: StagePart, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of the stage or of a later one."""
        runs = part.where == "every" or part.where == "last"
        return call(*args, **kwargs) if runs else part.zeros(args, kwargs, self.run.stream)


def _equal(tensor: Tensor | None, expected: Tensor) -> bool:
    return tensor is not None and tensor.shape == expected.shape and torch.equal(tensor, expected)


def record(model: nn.Module, staged: StagedModel, inputs: Mapping[str, Any]) -> Record:
    """Run a copy of the model whole."""
    result = Record()
    with torch.no_grad(), running(staged, result):
        result.output = model(**{**inputs, "use_cache": False})
    if result.order != list(range(len(staged.blocks))):
        raise ModelError(
            f"{type(model).__name__} calls its blocks in the order {result.order[:8]}..., not each once from first to "
            "last, so its stages cannot follow one another: use a mesh without pp"
        )
    return result


def places(record: Record, blocks: int, outer: Sequence[str]) -> dict[str, Where]:
    """Return the stages of the modules outside of blocks from the times of their calls."""
    where: dict[str, Where] = {}
    for path in outer:
        times = record.times.get(path, {0})  # a module that no row of tokens needs, such as a tower, is on the first
        replaceable = path not in record.times or record.absent[path] is not None
        if not replaceable or times not in ({0}, {blocks}):
            where[path] = "every"
        else:
            where[path] = "first" if times == {0} else "last"
    return where


def crossing(
    model: nn.Module, staged: StagedModel, whole: Record, inputs: Mapping[str, Any], first: int
) -> list[Value]:
    """Return the values that a stage from block ``first`` on needs from the stages before it."""
    known, call = whole.values(first), whole.calls[first - 1]
    values = [value for value in call.outputs if value.place == "output"]
    ranges = staged.ranges
    staged.ranges = ((0, first), (first, len(staged.blocks)))
    try:
        for _ in range(2):
            run = StageRun(staged, 1, {value: whole.tensor(value) for value in values})
            compared = RecordedBlocks(whole, run)
            with torch.no_grad(), running(staged, compared):
                output = model(**stage_inputs(inputs, 1, 2))
            if not compared.differing:
                break
            for value in compared.differing:
                source = known.get(id(whole.calls[value.block].given[value.path]), value)
                values += [source] if source not in values else []
    finally:
        staged.ranges = ranges
    if compared.differing:
        raise ModelError(f"{type(model).__name__}: {compared.differing[0]} cannot be sent to its stage: use no pp")
    if not _equal(logits_of(output), logits_of(whole.output)):
        raise ModelError(
            f"{type(model).__name__} uses tensors of block {first - 1} or of an earlier block after its last block: "
            "such tensors are not sent between stages; use a mesh without pp"
        )
    return values


def logits_of(output: Any) -> Tensor:
    """Return the logits, else the first floating-point tensor, of a model's output."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    return next(tensor for _, tensor in tensors_in(output) if tensor.is_floating_point())
