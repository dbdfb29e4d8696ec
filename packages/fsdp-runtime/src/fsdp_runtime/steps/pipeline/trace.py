"""Find the tensors that cross stages: run a small copy whole, then its code around the blocks on each stage.

The second run replaces every block by its recorded outputs.  An input of a block that then differs from the record
depends on an absent part, so the stage has to receive it.  Then the stages of the copy must give the logits and
gradients of the whole copy.

Towers of images, videos and sound are on the first stage, which adds their features to the token embeddings.  Later
stages get a micro-batch without its pixels and samples.  The first stage checks that no input of a later block depends
on them, before the first schedule with media.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime._peft_compat import base_model, without_adapters
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.model.structure import inspect_model
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.sharded.collectives import all_gather_objects, raise_on_all, ranks_of
from fsdp_runtime.steps.pipeline.parts import (
    Absent,
    Call,
    Inputs,
    StagedModel,
    StagePart,
    StageRun,
    Where,
    add_parts,
    media_names,
    media_of,
    outer_modules,
    running,
    stage_inputs,
)
from fsdp_runtime.steps.pipeline.state import absent_tensors, without
from fsdp_runtime.steps.pipeline.values import (
    Path,
    Place,
    Value,
    at,
    equal,
    filled,
    skeleton_of,
    tensors_in,
    with_tensor,
)
from tp_plans import TpPlansError
from tp_plans.runtime import tiny_model

#: Two shapes of rows: dims of tensors that differ between them are rows or tokens.
_SHAPES = ((2, 7), (3, 11))
#: The largest difference of stages from the whole, relative to the largest element.
_BOUND = 1e-9


def find_crossing_tensors(model: nn.Module, staged: StagedModel) -> None:
    """Fill in the record of the stages from runs of a small copy."""
    base = base_model(model)
    prefix = next(f"{path}." if path else "" for path, module in model.named_modules() if module is base)
    small = _small_copy(without_adapters(base), len(staged.blocks))
    staged.blocks = tuple(path.removeprefix(prefix) for path in staged.blocks)
    paths = [path for path, _ in outer_modules(small, inspect_model(small))]
    staged.outer = dict.fromkeys(paths, "every")
    staged.replaced = dict.fromkeys(paths, "like")
    add_parts(small, staged)
    inputs, longer_inputs = (_rows(small, shape) for shape in _SHAPES)
    whole, longer = _recorded(small, staged, inputs), _recorded(small, staged, longer_inputs)
    staged.outer = {path: _place(whole, path, len(staged.blocks)) for path in paths}
    staged.replaced = {path: whole.absent.get(path) or "like" for path in paths}
    staged.skeletons = tuple(call.skeleton for call in whole.calls)
    staged.entries = tuple(call.entries for call in whole.calls)
    add_parts(small, staged)
    staged.sent = tuple(tuple(_crossing(small, staged, whole, inputs, start)) for start, _ in staged.ranges[1:])
    staged.varying = {value: _varying(value, whole, longer) for values in staged.sent for value in values}
    staged.unused = _require_equal(small, staged, inputs)
    staged.blocks = tuple(prefix + path for path in staged.blocks)
    staged.outer = {prefix + path: where for path, where in staged.outer.items()}
    staged.replaced = {prefix + path: absent for path, absent in staged.replaced.items()}


def _small_copy(model: nn.Module, blocks: int) -> Any:
    """Return a copy with the same number of blocks that runs on the CPU in float64."""
    name = type(model).__name__
    try:
        small: Any = tiny_model(model, tp=1, all_blocks=True).model
    except TpPlansError as error:
        raise ModelError(f"the stages of {name} cannot be verified, since no small copy of it runs: {error}") from error
    if len(inspect_model(small).decoder) != blocks:
        raise ModelError(f"no small copy of {name} has its {blocks} blocks: use a mesh without pp")
    return small


def _rows(model: Any, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the keywords of a forward without a cache."""
    vocabulary = len(model.get_input_embeddings().weight)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, shape, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}


def _varying(value: Value, whole: _WholeRun, longer: _WholeRun) -> tuple[str | None, ...]:
    """Return for each dim of a sent tensor whether it is rows or tokens."""
    dims = {(rows, more): name for rows, more, name in zip(*_SHAPES, ("rows", "tokens"), strict=True)}
    shapes = zip(whole.tensor(value).shape, longer.tensor(value).shape, strict=True)
    return tuple(None if one == other else dims.get((one, other), "unknown") for one, other in shapes)


@dataclass
class _BlockCall:
    """The tensors of one call of a block."""

    inputs: dict[Path, Tensor]  # copies: model code may change its tensors in place
    given: dict[Path, Tensor]  # the inputs themselves
    outputs: dict[Value, Tensor]  # copies of the tensors of the output and of the entries
    produced: dict[Value, Tensor]  # these tensors themselves
    skeleton: Any
    entries: dict[Path, Any]  # skeletons of the values that the block added to its dicts and lists, by path

    def again(self, index: int, inputs: Any) -> Any:
        for top, skeleton in self.entries.items():
            at(inputs, top[:-1])[top[-1]] = filled(skeleton, partial(self._copy, index, "entry", top))
        return filled(self.skeleton, partial(self._copy, index, "output", ()))

    def _copy(self, index: int, place: Place, top: Path, path: Path) -> Tensor:
        return self.outputs[Value(index, place, (*top, *path))].clone()


@dataclass
class _WholeRun:
    """A forward of the whole copy."""

    calls: list[_BlockCall] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    times: dict[str, set[int]] = field(default_factory=dict)  # finished blocks at each call of an outer module
    absent: dict[str, Absent | None] = field(default_factory=dict)
    output: Any = None

    def block(self, index: int, call: Call, inputs: Inputs) -> Any:
        before = {path: id(part) for path, part in _entries(inputs).items()}
        tensors = dict(tensors_in(inputs))
        copies = {path: tensor.clone() for path, tensor in tensors.items()}
        output = call(*inputs[0], **inputs[1])
        entries = {path: part for path, part in _entries(inputs).items() if before.get(path) != id(part)}
        produced = {Value(index, "output", path): tensor for path, tensor in tensors_in(output)}
        for top, part in entries.items():
            produced |= {Value(index, "entry", (*top, *path)): tensor for path, tensor in tensors_in(part)}
        self.calls.append(
            _BlockCall(
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

    def outer(self, part: StagePart, call: Call, inputs: Inputs) -> Any:
        output = call(*inputs[0], **inputs[1])
        self.times.setdefault(part.path, set()).add(len(self.calls))
        self.absent[part.path] = _absent(inputs, output)
        return output

    def tensor(self, value: Value) -> Tensor:
        call = self.calls[value.block]
        return call.inputs[value.path] if value.place == "input" else call.outputs[value]


def _entries(inputs: Any) -> dict[Path, Any]:
    """Return the parts of the dicts and lists among a block's arguments, by path."""
    entries: dict[Path, Any] = {}
    for place, arguments in enumerate((dict(enumerate(inputs[0])), inputs[1])):
        for name, value in arguments.items():
            parts = dict(enumerate(value)) if isinstance(value, list) else value
            if isinstance(parts, MutableMapping):
                entries |= {(place, name, key): part for key, part in parts.items()}
    return entries


def _absent(inputs: Any, output: Any) -> Absent | None:
    """Return the kind of output that replaces a module's where it is absent; ``None`` if there is none."""
    first = next((tensor for _, tensor in tensors_in(inputs)), None)
    if first is None or not isinstance(output, Tensor):
        return None
    if not first.is_floating_point():
        return "table" if output.shape[:-1] == first.shape else None
    if output.shape == first.shape:
        return "like"
    return "linear" if output.shape[:-1] == first.shape[:-1] else None


class _RecordedBlocks(StageRun):
    """The second of two stages with a division before a block: its blocks return their recorded outputs."""

    def __init__(self, record: _WholeRun, staged: StagedModel, values: Iterable[Value]) -> None:
        super().__init__(staged, 1, {value: record.tensor(value) for value in values})
        self.record = record
        self.differing: list[Value] = []

    def block(self, index: int, call: Call, inputs: Inputs) -> Any:
        if index < self.first:
            return super().block(index, call, inputs)
        recorded = self.record.calls[index]
        for value in self.received_by(index, "input"):
            with_tensor(inputs, value.path, self.received[value])
        tensors = dict(tensors_in(inputs))
        for path, expected in recorded.inputs.items():
            if not equal(tensors.get(path), expected):
                self.differing.append(Value(index, "input", path))
        return recorded.again(index, inputs)


def _recorded(model: nn.Module, staged: StagedModel, inputs: Mapping[str, Any]) -> _WholeRun:
    """Run a copy of the model whole."""
    result = _WholeRun()
    with torch.no_grad(), running(staged, result):
        result.output = model(**inputs)
    if result.order != list(range(len(staged.blocks))):
        raise ModelError(
            f"{type(model).__name__} calls its blocks in the order {result.order[:8]}..., not each once from first to "
            "last, so its stages cannot follow one another: use a mesh without pp"
        )
    return result


def _place(record: _WholeRun, path: str, blocks: int) -> Where:
    """Return the stages of a module outside of blocks from the times of its calls."""
    times = record.times.get(path, {0})  # a module that no row of tokens needs, such as a tower, is on the first
    is_replaceable = path not in record.times or record.absent[path] is not None
    if not is_replaceable or times not in ({0}, {blocks}):
        return "every"
    return "first" if times == {0} else "last"


def _crossing(
    model: nn.Module, staged: StagedModel, whole: _WholeRun, inputs: Mapping[str, Any], first: int
) -> list[Value]:
    """Return the values that a stage from block ``first`` on needs from the stages before it."""
    known = {id(tensor): value for call in whole.calls[:first] for value, tensor in call.produced.items()}
    values = [value for value in whole.calls[first - 1].outputs if value.place == "output"]
    ranges = staged.ranges
    staged.ranges = ((0, first), (first, len(staged.blocks)))
    try:
        for _ in range(2):
            compared = _RecordedBlocks(whole, staged, values)
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
    if not equal(_logits_of(output), _logits_of(whole.output)):
        raise ModelError(
            f"{type(model).__name__} uses tensors of block {first - 1} or of an earlier block after its last block: "
            "such tensors are not sent between stages; use a mesh without pp"
        )
    return values


def _logits_of(output: Any) -> Tensor:
    """Return the logits, else the first floating-point tensor, of a model's output."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    return next(tensor for _, tensor in tensors_in(output) if tensor.is_floating_point())


def _require_equal(model: Any, staged: StagedModel, inputs: Mapping[str, Any]) -> frozenset[str]:
    """Check that the stages give the logits and gradients of the whole copy; return parameters without a gradient."""
    weights: Tensor | None = None
    results = []
    for forward in (_whole, _staged):
        logits = forward(model, staged, inputs)
        weights = torch.rand(logits.shape, dtype=logits.dtype) if weights is None else weights
        (logits * weights).sum().backward()  # type: ignore[no-untyped-call]
        results.append((logits.detach(), {name: p.grad for name, p in model.named_parameters()}))
        model.zero_grad(set_to_none=True)
    (logits, gradients), (staged_logits, staged_gradients) = results
    name = type(model).__name__
    if error := _error(staged_logits, logits):
        raise ModelError(f"{name} computes other logits in stages, by {error:.1e} in a small copy: use no pp")
    for path, gradient in gradients.items():
        other = staged_gradients[path]
        if (gradient is None) != (other is None) or (gradient is not None and _error(other, gradient)):
            raise ModelError(
                f"the gradient of {path} of {name} differs in stages of a small copy: use a mesh without pp"
            )
    return frozenset(path for path, gradient in gradients.items() if gradient is None)


def _whole(model: Any, staged: StagedModel, inputs: Mapping[str, Any]) -> Tensor:
    with running(staged, _WholeRun()):
        return _logits_of(model(**inputs))


def _staged(model: Any, staged: StagedModel, inputs: Mapping[str, Any]) -> Tensor:
    received: dict[Value, Tensor] = {}
    for stage, rank in enumerate(staged.ranks):
        run = StageRun(staged, stage, received)
        with running(staged, run), without(absent_tensors(model, staged, rank)):
            output = model(**stage_inputs(inputs, stage, len(staged.ranks)))
        received = dict(zip(run.sending, run.sent(), strict=True))
    return _logits_of(output)


def _error(actual: Tensor | None, expected: Tensor) -> float:
    """Return the error relative to the largest element, 0 within the bound."""
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    error = float((actual - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)
    return 0.0 if error <= _BOUND else error


def require_media_on_first_stage(model: nn.Module, staged: StagedModel, batches: Sequence[Mapping[str, Any]]) -> None:
    """Check once for each set of media that only the first stage needs them.  Collective over the mesh."""
    media = [frozenset(media_of(batch)) for batch in batches]
    largest = max(range(len(batches)), key=lambda index: len(media[index]))
    taken = signature(type(base_model(model)).forward).parameters
    if not media_names(taken):
        if media[largest]:
            raise OptionError(
                f"micro-batch {largest} has {', '.join(sorted(media[largest]))}, which the forward of "
                f"{type(model).__name__} does not take: leave the media out"
            )
        return
    ranks = ranks_of(runtime_state(model).mesh)
    names = frozenset[str]().union(*all_gather_objects(ranks, frozenset[str]().union(*media)).values())
    if names <= staged.media:
        return
    with raise_on_all(ranks) as step:
        step.value = _later_features(model, staged, batches[largest]) if 0 in staged.stages else ""
    if refusal := next(filter(None, step.values.values()), ""):
        raise ModelError(refusal)
    staged.media |= names


def _later_features(model: nn.Module, staged: StagedModel, batch: Mapping[str, Any]) -> str:
    """Return a message unless later blocks and the final norm get the same inputs without media."""
    runs = []
    for stage in (0, 1):
        run = _LaterInputs(staged)
        with torch.no_grad(), running(staged, run):
            model(**stage_inputs(batch, stage, len(staged.ranks)))
        runs.append(run.inputs)
    with_media, no_media = runs
    sent = {value for values in staged.sent for value in values}
    differing = sorted(v for v in {*with_media, *no_media} - sent if not equal(with_media.get(v), no_media.get(v)))
    if not differing:
        return ""
    least = max(value.block for value in differing) + 1
    fix = f"give the first stage at least {least} blocks by Pipeline(layers=...)"
    return (
        f"{type(model).__name__} injects features of {', '.join(media_of(batch))} after the first stage, as "
        f"{differing[0]}: {fix if least < len(staged.blocks) else 'use a mesh without pp'}"
    )


class _LaterInputs(StageRun):
    """A forward of the first stage's outer modules that records the inputs of later blocks; blocks return zeros."""

    def __init__(self, staged: StagedModel) -> None:
        super().__init__(staged, 0, {})
        self.inputs: dict[Value, Tensor] = {}

    def block(self, index: int, call: Call, inputs: Inputs) -> Any:
        if index >= self.end:
            self._record(index, inputs)
        zeros = torch.zeros_like(next(tensor for _, tensor in tensors_in(inputs)))
        return filled(self.staged.skeletons[index], lambda _: zeros)

    def outer(self, part: StagePart, call: Call, inputs: Inputs) -> Any:
        if part.where == "last":
            self._record(len(self.staged.blocks), inputs)
        return super().outer(part, call, inputs)

    def _record(self, index: int, inputs: Inputs) -> None:
        self.inputs |= {Value(index, "input", path): tensor for path, tensor in tensors_in(inputs)}
