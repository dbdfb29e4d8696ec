"""Replay the actions of torch's schedule with the costs of each rank: its peak, its traffic and its idle time."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, permutations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from fsdp_runtime.dry_run.scale.repeated_blocks import TracedModel, block_signature
from fsdp_runtime.dry_run.scale.summary import CallKey, StepRegion, Summary, add_up
from fsdp_runtime.dry_run.stages.rank import Action, Cost, RankTrace, Shapes
from fsdp_runtime.dry_run.types import MemoryBreakdown, Peak, Phase, PipelineRank, plus
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.steps.pipeline.parts import StagedModel
from fsdp_runtime.steps.pipeline.shapes import Sent

#: Computations by torch's name; its other actions are communication.
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class Turn(NamedTuple):
    """An action of a schedule."""

    stage: int
    kind: str  # ``F``, ``B``, or ``I`` and ``W`` of a split backward
    batch: int


def rank_kinds(full: TracedModel, staged: StagedModel, shapes: Shapes) -> list[Any]:
    """Return a key of each rank of ``pp``; ranks with equal keys have equal costs."""
    blocks = [block_signature(full.structure.blocks[path]) for path in full.structure.decoder]
    last = len(staged.ranks) - 1

    def stage_key(stage: int) -> Any:
        sizes = [_sizes(shapes[boundary]) for boundary in (stage - 1, stage) if 0 <= boundary < last]
        return stage == 0, stage == last, tuple(blocks[slice(*staged.ranges[stage])]), sizes

    return [[stage_key(stage) for stage in staged.stages_of(rank)] for rank in sorted(set(staged.ranks))]


def replay(
    traces: Sequence[RankTrace], staged: StagedModel, shapes: Shapes, blocks: int
) -> tuple[Summary, tuple[PipelineRank, ...]]:
    """Return the summary of the rank of ``pp`` with the highest peak, and a row of every rank."""
    order = actions_by_rank(staged)
    messages = [*_messages(staged, shapes, traces)]
    replays = [_RankReplay(trace, staged, rank, order[rank]) for rank, trace in enumerate(traces)]
    ends = finish_times(order, lambda rank, step: float(sum(replays[rank].cost(step, first=False).flops.values())))
    total = max(ends.values())
    rows = tuple(
        PipelineRank(
            rank=rank,
            blocks=tuple((start, end - 1) for start, end in (staged.ranges[s] for s in staged.stages_of(rank))),
            resident=replace(each.trace.before, inputs=0),
            peak=max(each.peaks.values(), key=lambda peak: peak.total).nbytes,
            in_flight=each.in_flight,
            flops=sum(each.flops.values()),
            idle=1 - each.flops_of_actions / total if total else 0.0,
            bytes_sent={
                other: sum(each[-1] for each in messages if each[:2] == (rank, other))
                for other in sorted({each[1] for each in messages if each[0] == rank})
            },
        )
        for rank, each in enumerate(replays)
    )
    worst = max(replays, key=lambda each: rows[each.rank].peak.total)
    group = tuple(dist.get_process_group_ranks(staged.mesh.get_group()))
    sends = [
        ((phase, "send", group), (calls, nbytes, nbytes))
        for sender, _, phase, calls, nbytes in messages
        if sender == worst.rank
    ]
    return worst.summary(blocks, add_up(sends)), rows


class _RankReplay:
    def __init__(self, trace: RankTrace, staged: StagedModel, rank: int, actions: Sequence[Turn]) -> None:
        self.trace, self.rank = trace, rank
        self.places = {stage: place for place, stage in enumerate(staged.stages_of(rank))}
        self.peaks: dict[Phase, Peak] = {}
        self.ends: dict[Phase, MemoryBreakdown] = {}
        self.traffic: list[Mapping[CallKey, tuple[int, ...]]] = []
        self.flops: Counter[str] = Counter()
        self.bytes_moved = self.in_flight = 0
        buffers = MemoryBreakdown(inputs=trace.buffers)
        self.live = plus(trace.before, buffers, staged.schedules.microbatches)
        for cost in trace.opening:
            self._add(cost)
        self._run(actions)
        self.flops_of_actions = sum(self.flops.values())
        if shared := sum(trace.shared.values()):
            parts = MemoryBreakdown(temporaries=2 * shared)
            peak = Peak(phase="backward", module="", operator="sum of gradients over stages", nbytes=parts)
            self._add(Cost(peaks=(peak,)))
        self.live = plus(self.live, buffers, -staged.schedules.microbatches)
        self.live = replace(self.live, gathered=-trace.after[0].kept.gathered)
        for cost in trace.after:
            self._add(cost)

    def _run(self, actions: Sequence[Turn]) -> None:
        most, held = self.live, self.live.gathered
        started: set[Action] = set()
        gathered: set[int] = set()  # places with gathered weights since the last forward
        flying: set[tuple[int, int]] = set()
        for step in actions:
            action = self.places[step.stage], "gradients" if step.kind in "BW" else step.kind
            cost = self.cost(step, first=action not in started)
            started.add(action)
            if step.kind == "F":
                self.live, gathered = replace(self.live, gathered=held), set()
            elif action[0] in gathered:
                cost = cost.without_gathers()
            else:
                gathered.add(action[0])
            self._add(cost)
            flying ^= {(step.stage, step.batch)} if step.kind != "I" else set()
            if step.kind == "F" and len(flying) > self.in_flight:
                self.in_flight, most = len(flying), self.live
        self.ends["forward"] = most

    def cost(self, step: Turn, *, first: bool) -> Cost:
        costs = self.trace.first if first else self.trace.later
        return costs[self.places[step.stage], step.kind]

    def _add(self, cost: Cost) -> None:
        for peak in cost.peaks:
            lifted = replace(peak, nbytes=plus(self.live, peak.nbytes))
            if peak.phase not in self.peaks or lifted.total > self.peaks[peak.phase].total:
                self.peaks[peak.phase] = lifted
        self.live = plus(self.live, cost.kept)
        for peak in cost.peaks:
            self.ends[peak.phase] = self.live
        self.traffic.append(cost.traffic)
        self.flops.update(cost.flops)
        self.bytes_moved += cost.bytes_moved

    def summary(self, blocks: int, sends: Mapping[CallKey, tuple[int, ...]]) -> Summary:
        trace = self.trace
        return Summary(
            blocks=blocks,
            regions={StepRegion(phase, -1, False): peak for phase, peak in self.peaks.items()},
            before=trace.before,
            ends=self.ends,
            traffic=add_up(item for each in (*self.traffic, sends) for item in each.items()),
            tape=(),
            flops=self.flops,
            bytes_moved=self.bytes_moved,
            replicated=trace.replicated,
            on_host=trace.on_host * self.in_flight,
            assumptions=trace.assumptions,
            untrained=trace.untrained,
        )


def _messages(
    staged: StagedModel, shapes: Shapes, traces: Sequence[RankTrace]
) -> Iterator[tuple[int, int, Phase, int, int]]:
    """Yield sender, receiver, phase, count and bytes of the tensors between ranks of ``pp`` in a step."""
    batches = staged.schedules.microbatches
    for sent, one, other in zip(shapes, staged.ranks, staged.ranks[1:], strict=False):
        if one != other:
            yield one, other, "forward", batches * len(sent), batches * _sizes(sent)
            back = [each for each in sent if each.dtype.is_floating_point]
            yield other, one, "backward", batches * len(back), batches * _sizes(back)
    for name, holders in staged.shared.items():
        for one, other in permutations(holders, 2):
            yield one, other, "backward", 1, traces[one].shared[name]


def _sizes(tensors: Iterable[Sent]) -> int:
    return sum(sent.buffer(backward=False).nbytes for sent in tensors)


def actions_by_rank(staged: StagedModel) -> dict[int, list[Turn]]:
    """Return the actions of each rank of ``pp``, in the order in which torch's schedule runs them."""
    step, number = staged.schedules, len(staged.ranks)
    mine = staged.stages_of(staged.mesh.get_local_rank())
    stages = [PipelineStage(nn.Identity(), s, number, torch.device("cpu"), group=staged.mesh.get_group()) for s in mine]
    kind = get_schedule_class(step.schedule)
    single = issubclass(kind, PipelineScheduleSingle)
    schedule: Any = kind(stages[0] if single else stages, step.microbatches, loss_fn=torch.sum, scale_grads=False)
    # Schedules with several stages also have the order with merged backwards.
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    steps = {rank: list(_computations(actions)) for rank, actions in order.items()}
    return {rank: _numbered(actions) for rank, actions in steps.items()} if single else steps


def _numbered(steps: Sequence[Turn]) -> list[Turn]:
    """Number the micro-batches in the order of their actions: torch 2.13 counts forwards of a last stage from 1."""
    batches: defaultdict[str, count[int]] = defaultdict(count)
    return [step._replace(batch=next(batches[step.kind])) for step in steps]


def _computations(actions: Sequence[Any]) -> Iterator[Turn]:
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield from _computations(action.sub_actions)
        elif kind := _KINDS.get(action.computation_type.name):
            yield Turn(action.stage_index, kind, action.microbatch_index)


def finish_times(order: Mapping[int, Sequence[Turn]], duration: Callable[[int, Turn], float]) -> dict[Turn, float]:
    """Return the time at which each action ends; a rank waits for tensors of other stages, and sends take no time."""
    ends: dict[Turn, float] = {}
    clocks, waiting = dict.fromkeys(order, 0.0), {rank: deque(steps) for rank, steps in order.items()}
    every = {step for steps in order.values() for step in steps}
    while len(ends) < len(every):
        known = len(ends)
        for rank, steps in waiting.items():
            while steps and (needed := _needed(steps[0]) & every) <= ends.keys():
                step = steps.popleft()
                clocks[rank] = max([clocks[rank], *(ends[each] for each in needed)]) + duration(rank, step)
                ends[step] = clocks[rank]
        if len(ends) == known:
            raise EstimateError("the actions of the schedule wait for one another: use another schedule")
    return ends


def _needed(step: Turn) -> set[Turn]:
    """Return the actions that an action waits for, some of them in no schedule."""
    stage, kind, batch = step
    if kind == "F":
        return {Turn(stage - 1, "F", batch)}
    return {Turn(stage, "F", batch), *(Turn(stage + 1, other, batch) for other in "BI" if kind != "W")}
