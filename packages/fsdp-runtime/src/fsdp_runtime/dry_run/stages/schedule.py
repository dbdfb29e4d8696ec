"""The actions of torch's schedules in order, and their times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from fsdp_runtime.errors import EstimateError
from fsdp_runtime.steps.pipeline.parts import StagedModel

#: Computations by torch's name; its other actions are communication.
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class Turn(NamedTuple):
    """An action of a schedule."""

    stage: int
    kind: str  # ``F``, ``B``, or ``I`` and ``W`` of a split backward
    batch: int


def actions_by_rank(staged: StagedModel) -> dict[int, list[Turn]]:
    """Return the actions of each rank of ``pp``, in the order in which torch's schedule runs them."""
    step, count = staged.schedules, len(staged.ranks)
    mine = staged.stages_of(staged.mesh.get_local_rank())
    stages = [PipelineStage(nn.Identity(), s, count, torch.device("cpu"), group=staged.mesh.get_group()) for s in mine]
    kind = get_schedule_class(step.schedule)
    single = issubclass(kind, PipelineScheduleSingle)
    schedule: Any = kind(stages[0] if single else stages, step.microbatches, loss_fn=torch.sum, scale_grads=False)
    # Schedules with several stages also have the order with merged backwards.
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    steps = {rank: list(_computations(actions)) for rank, actions in order.items()}
    return {rank: _numbered(actions) for rank, actions in steps.items()} if single else steps


def _numbered(steps: Sequence[Turn]) -> list[Turn]:
    """Number the micro-batches in the order of their actions: torch 2.13 counts forwards of a last stage from 1."""
    counts: Counter[str] = Counter()
    numbered = []
    for step in steps:
        numbered.append(step._replace(batch=counts[step.kind]))
        counts[step.kind] += 1
    return numbered


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
    clocks, position = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0)
    every = {step for steps in order.values() for step in steps}
    while len(ends) < len(every):
        known = len(ends)
        for rank, steps in order.items():
            while position[rank] < len(steps):
                step = steps[position[rank]]
                needed = _needed(step) & every
                if not needed <= ends.keys():
                    break
                clocks[rank] = max([clocks[rank], *(ends[each] for each in needed)]) + duration(rank, step)
                ends[step] = clocks[rank]
                position[rank] += 1
        if len(ends) == known:
            raise EstimateError("the actions of the schedule wait for one another: use another schedule")
    return ends


def _needed(step: Turn) -> set[Turn]:
    """Return the actions that an action waits for, some of them in no schedule."""
    stage, kind, batch = step
    if kind == "F":
        return {Turn(stage - 1, "F", batch)}
    return {Turn(stage, "F", batch), *(Turn(stage + 1, other, batch) for other in "BI" if kind != "W")}
