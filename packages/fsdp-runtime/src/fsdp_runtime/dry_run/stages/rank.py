"""The costs of one rank of ``pp``, recorded on a few micro-batches; later ones find gradients and gathered weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime import unsharded
from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime.dry_run.losses import Forward, resolve_loss
from fsdp_runtime.dry_run.scale.repeated_blocks import TracedModel
from fsdp_runtime.dry_run.scale.summary import CallKey, storage_categories, traffic_of
from fsdp_runtime.dry_run.step import Prepared, StepConfig, prepared
from fsdp_runtime.dry_run.trace.recorder import Lap, Recording, with_fused_storages
from fsdp_runtime.dry_run.types import Assumption, MemoryBreakdown, Peak, plus
from fsdp_runtime.parallelism import Parallelism
from fsdp_runtime.steps import Pipeline
from fsdp_runtime.steps.pipeline.parts import StagedModel, StageRun, running, stage_inputs
from fsdp_runtime.steps.pipeline.schedule import ModelParameters, Stage, accumulating
from fsdp_runtime.steps.pipeline.shapes import Sent, described

#: The tensors that each stage but the last sends.
Shapes = Sequence[tuple[Sent, ...]]
#: The place of a stage on its rank, and its action: ``F``, ``B``, or ``I`` and ``W`` of a split backward.
Action = tuple[int, str]


@dataclass(frozen=True)
class Cost:
    """The cost of an action; bytes are relative to the live bytes before it."""

    kept: MemoryBreakdown = field(default_factory=MemoryBreakdown)  # live after it; negative where it frees more
    peaks: tuple[Peak, ...] = ()  # of each phase
    flops: Mapping[str, int] = field(default_factory=dict)  # by kind
    bytes_moved: int = 0
    traffic: Mapping[CallKey, tuple[int, ...]] = field(default_factory=dict)

    def without_gathers(self) -> Cost:
        """Return the cost of an action that finds its weights gathered."""
        peaks = tuple(replace(peak, nbytes=replace(peak.nbytes, gathered=0)) for peak in self.peaks)
        traffic = {
            key: totals for key, totals in self.traffic.items() if key[1] != "all_gather" or not self.kept.gathered
        }
        return replace(self, kept=replace(self.kept, gathered=0), peaks=peaks, traffic=traffic)

    def raised(self, nbytes: MemoryBreakdown) -> Cost:
        """Return the cost of an action that first adds bytes and keeps them."""
        peaks = tuple(replace(peak, nbytes=plus(nbytes, peak.nbytes)) for peak in self.peaks)
        return replace(self, kept=plus(nbytes, self.kept), peaks=peaks)


def costs_of(
    recording: Recording, blocks: Sequence[str], vocabulary: set[int], actions: Sequence[int]
) -> tuple[MemoryBreakdown, list[Cost]]:
    """Return the live bytes before the first phase, and the cost of each action; actions are numbers of phases."""
    recording = with_fused_storages(recording)
    laps = recording.laps
    names = storage_categories(recording, blocks, vocabulary)
    live: Counter[str] = Counter()
    first = next((n for n, each in enumerate(recording.allocations) if each.event >= 0), len(recording.allocations))
    for each in recording.allocations[:first]:
        live[names[each.storage]] += each.delta
    before, costs = MemoryBreakdown(**live), list[Cost]()
    previous, position = Lap("forward", first, 0, {}, 0), 0
    for count in actions:
        start, begin, peaks = MemoryBreakdown(**live), previous.allocations, list[Peak]()
        for end in laps[position : position + count]:
            peaks.append(_peak(recording, names, live, start, begin, end))
            begin = end.allocations
        costs.append(
            Cost(
                kept=plus(MemoryBreakdown(**live), start, -1),
                peaks=tuple(peaks),
                flops={kind: n - previous.flops.get(kind, 0) for kind, n in end.flops.items()},
                bytes_moved=end.bytes_moved - previous.bytes_moved,
                traffic=traffic_of(recording.collectives[previous.collectives : end.collectives]),
            )
        )
        previous, position = end, position + count
    return before, costs


def _peak(
    recording: Recording, names: Sequence[str], live: Counter[str], start: MemoryBreakdown, begin: int, lap: Lap
) -> Peak:
    """Replay the allocations of a phase on the live bytes, and return its peak relative to ``start``."""
    total = most = sum(live.values())
    highest, event = dict(live), -1
    for each in recording.allocations[begin : lap.allocations]:
        live[names[each.storage]] += each.delta
        total += each.delta
        if total > most:
            most, highest, event = total, dict(live), each.event
    module, operator = recording.events[event][1:] if event >= 0 else ("", "")
    return Peak(phase=lap.phase, module=module, operator=operator, nbytes=plus(MemoryBreakdown(**highest), start, -1))


@dataclass(frozen=True)
class RankTrace:
    """The costs of a rank of ``pp``."""

    before: MemoryBreakdown  # live between calls, and token ids
    buffers: int  # bytes of received activations and gradients of each micro-batch
    opening: tuple[Cost, ...]  # of a gather of all weights before the actions
    first: Mapping[Action, Cost]  # of the first micro-batch
    later: Mapping[Action, Cost]
    after: tuple[Cost, ...]  # of the reduction, the clipping and the optimizer
    replicated: Mapping[str, tuple[int, ...]]
    untrained: Mapping[str, tuple[int, ...]]
    assumptions: tuple[Assumption, ...]
    on_host: int  # bytes of activations of one micro-batch
    shared: Mapping[str, int]  # bytes of gradients that another rank of ``pp`` has too


def staged_of(parallelism: Parallelism) -> StagedModel:
    """Return the record of the stages."""
    staged: StagedModel = next(checked for step, checked in parallelism.steps if isinstance(step, Pipeline))
    return staged


def _on_rank(parallelism: Parallelism, **fields: Any) -> tuple[Parallelism, StagedModel]:
    """Return the parallelism of another rank of ``pp``, and its record of the stages."""
    staged = replace(staged_of(parallelism), **fields)
    steps = tuple((step, staged if isinstance(step, Pipeline) else checked) for step, checked in parallelism.steps)
    return replace(parallelism, steps=steps), staged


def sent_shapes(full: TracedModel, parallelism: Parallelism, step: StepConfig) -> Shapes:
    """Return the tensors between stages, from a forward in which one rank has all stages."""
    count = len(staged_of(parallelism).ranks)
    alone, staged = _on_rank(parallelism, ranks=(0,) * count, rank=0, shared={})
    shapes: list[tuple[Sent, ...]] = []
    with prepared(full.copy(), alone, replace(step, optimizer="none"), frozenset()) as run, torch.no_grad():
        for stage in range(count - 1):
            buffers = _buffers(shapes[stage - 1]) if stage else ()
            with run.recorder.phase("forward"):
                tensors = _run_stage(run, staged, stage, buffers, shapes)
            shapes.append(tuple(replace(described(tensor), mesh=staged.tp) for tensor in tensors))
    return shapes


def trace_rank(
    traced: TracedModel,
    parallelism: Parallelism,
    step: StepConfig,
    without_grad: frozenset[str],
    *,
    rank: int,
    shapes: Shapes,
) -> RankTrace:
    """Parallelize a model on the meta device as one rank of ``pp``, and record its actions."""
    parallelism, staged = _on_rank(parallelism, rank=rank)
    splits = staged.schedules.splits_backward
    rounds = ("FIW", "FIW", "FB") if splits else ("FB", "FB")
    with prepared(traced, parallelism, step, without_grad) as run:
        record = _StageRecord(run, staged, shapes, resolve_loss(step.logprobs, traced.structure.lm_head), len(rounds))
        untrained = record.all(rounds)
        before, costs = costs_of(run.recorder.recording, traced.structure.decoder, run.widths, record.laps)
        opening, costs = costs[: record.opening], costs[record.opening :]
        parameters = dict(run.model.named_parameters())
    size = len(rounds[0]) * len(staged.stages)
    by_action = [*zip(record.names, _with_levels(record.names, costs), strict=True)]
    first, later = dict(by_action[:size]), dict(by_action[size:])
    for place in range(len(staged.stages)) if splits else ():
        added = plus(first[place, "W"].kept, later[place, "W"].kept, -1)
        first[place, "B"] = later[place, "B"].raised(added)
    return RankTrace(
        before=plus(before, MemoryBreakdown(inputs=record.received), -len(rounds)),
        buffers=record.received,
        opening=tuple(opening),
        first=first,
        later=later,
        after=tuple(costs[len(record.names) :]),
        replicated=run.replicated,
        untrained=untrained,
        assumptions=tuple(run.recorder.recording.assumptions),
        on_host=run.on_host.held.peak // len(rounds),
        shared={name: local_tensor(parameters[name]).nbytes for name in staged.shared if name in parameters},
    )


def _with_levels(names: Sequence[Action], costs: Sequence[Cost]) -> Iterator[Cost]:
    """Yield the costs, of a forward with all gathered bytes in place of their change."""
    # FSDP2 frees all gathered weights at the next forward of the model; weights of several backwards add up.
    level = 0
    for (_, kind), cost in zip(names, costs, strict=False):
        before = MemoryBreakdown(gathered=level if kind == "F" else 0)
        level += cost.kept.gathered
        yield cost.raised(before)


class _StageRecord:
    def __init__(self, run: Prepared, staged: StagedModel, shapes: Shapes, loss: Forward, batches: int) -> None:
        self.run, self.staged, self.shapes, self.loss = run, staged, shapes, loss
        self.names: list[Action] = []
        self.laps: list[int] = []  # phases of each action
        self.opening = 0  # phases before the first action
        self.split: dict[int, Any] = {}  # results of backwards of inputs, by place
        self.sent: list[Any] = []  # torch waits for the sends of several stages at the end of the schedule
        last, group = len(staged.ranks) - 1, staged.mesh.get_group()
        self.stage = Stage(ModelParameters(run.model), 0, last + 1, torch.device("cpu"), group=group)
        self.activations = {
            (n, stage): _buffers(shapes[stage - 1]) for n in range(batches) for stage in staged.stages if stage
        }
        self.gradients = {
            (n, stage): tuple(b if b.requires_grad else None for b in _buffers(shapes[stage]))
            for n in range(batches)
            for stage in staged.stages
            if stage != last
        }
        buffers = [
            b for held in (self.activations, self.gradients) for of in held.values() for b in of if b is not None
        ]
        run.recorder.register(buffers, "inputs")
        self.received = sum(buffer.nbytes for buffer in buffers) // batches

    def all(self, rounds: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Record every action, the reduction and the update; return the parameters without gradients."""
        model, recorder = self.run.model, self.run.recorder
        fsdp = model if isinstance(model, FSDPModule) else None
        places = range(len(self.staged.stages))
        with ExitStack() as gathered, accumulating(fsdp):
            if self.staged.schedules.splits_backward:
                with self._recorded(None), recorder.phase("forward"):
                    gathered.enter_context(unsharded(model))
                self.opening = len(self.laps)
            for number, actions in enumerate(rounds):
                outputs: dict[int, tuple[Tensor, ...]] = {}
                for place in places:
                    outputs[place] = self._forward(number, place, outputs)
                for place in reversed(places):
                    for action in actions[1:]:
                        self._backward(number, place, action, outputs)
            self.sent.clear()
            with self._recorded(None), recorder.phase("backward"):
                if fsdp is not None:
                    self.stage.reduce_gradients(fsdp)
                gathered.close()
                untrained = self.run.untrained()
        with self._recorded(None):
            self.run.update()
        return untrained

    @contextmanager
    def _recorded(self, action: Action | None) -> Iterator[None]:
        """Count the phases that are recorded inside the ``with``."""
        laps = self.run.recorder.recording.laps
        before = len(laps)
        yield
        if len(laps) > before:
            self.laps.append(len(laps) - before)
            self.names += [] if action is None else [action]

    def _is_local(self, stage: int) -> bool:
        """Return whether this rank has a stage and the one before it, which pass on tensors without a send."""
        return stage in self.staged.stages and stage - 1 in self.staged.stages

    def _forward(self, number: int, place: int, outputs: Mapping[int, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        stage, recorder = self.staged.stages[place], self.run.recorder
        with self._recorded((place, "F")), recorder.phase("forward"), self.run.hooks():
            if self._is_local(stage):
                local = [t.detach().requires_grad_(t.is_floating_point()) for t in outputs[place - 1]]
                self.activations[number, stage] = tuple(local)
            received = self.activations.get((number, stage), ())
            return _run_stage(self.run, self.staged, stage, received, self.shapes, self.loss)

    def _backward(self, number: int, place: int, action: str, outputs: dict[int, tuple[Tensor, ...]]) -> None:
        stage, mine = self.staged.stages[place], self.staged.stages
        received = self.activations.get((number, stage), ())
        with self._recorded((place, action)), self.run.recorder.phase("backward"):
            if action == "I" and stage:
                _, self.split[place] = self._run("input", number, stage, outputs.pop(place))
            elif action == "W" and stage:
                self.stage.backward_maybe_with_nosync("weight", {"param_groups": self.split.pop(place)})
            elif action != "I":
                sent = outputs.pop(place)
                gradients, _ = self._run("full", number, stage, sent)
                if len(mine) > 1:
                    self.sent += [*gradients, *(tensor.detach() for tensor in sent if not self._is_local(stage + 1))]
                if self._is_local(stage):
                    self.gradients[number, stage - 1] = gradients
                del sent, gradients  # while the phase is recorded
            if action == "I" and self._is_local(stage):
                self.gradients[number, stage - 1] = tuple(tensor.grad for tensor in received)

    def _run(self, kind: str, number: int, stage: int, outputs: tuple[Tensor, ...]) -> Any:
        """Run a backward of torch's stage; of the last stage, from its loss."""
        is_loss = stage == len(self.staged.ranks) - 1 and kind == "full"
        return self.stage.backward_maybe_with_nosync(
            kind,
            {
                "stage_output": outputs[0] if is_loss else outputs,
                "output_grads": self.gradients.get((number, stage)),
                "input_values": list(self.activations.get((number, stage), ())),
            },
        )


def _buffers(shapes: Sequence[Sent]) -> tuple[Tensor, ...]:
    """Return tensors to receive, of this rank's part."""
    return tuple(torch.empty(s.shape, dtype=s.dtype, requires_grad=s.dtype.is_floating_point) for s in shapes)


def _run_stage(
    run: Prepared,
    staged: StagedModel,
    stage: int,
    buffers: Sequence[Tensor],
    shapes: Shapes,
    loss: Forward | None = None,
) -> tuple[Tensor, ...]:
    """Run the forward of a stage; return the tensors that it sends, or the loss."""
    values = staged.sent[stage - 1] if stage else ()
    arrived = zip(values, shapes[stage - 1] if stage else (), buffers, strict=True)
    of_stage = StageRun(staged, stage, {value: shape.received(buffer) for value, shape, buffer in arrived})
    inputs = stage_inputs(run.inputs, stage, len(staged.ranks))
    with running(staged, of_stage):
        if stage == len(staged.ranks) - 1 and loss is not None:
            return (loss(run.model, inputs, lambda: run.recorder.begin("loss")),)
        run.model(**inputs)
    sent = of_stage.sent()
    return sent if loss is None else tuple(s.sent(t, s) for s, t in zip(shapes[stage], sent, strict=True))
