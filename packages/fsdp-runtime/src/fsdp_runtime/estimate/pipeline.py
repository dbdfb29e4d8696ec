"""The dry run from end to end: model, world, one or two traces, and what they tell."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime.errors import EstimateError
from fsdp_runtime.estimate.advice import advice_for
from fsdp_runtime.estimate.build_model import build_model
from fsdp_runtime.estimate.parse_args import dtype_name, plan_name
from fsdp_runtime.estimate.scale.repeated_blocks import Repetition, repetition, with_blocks
from fsdp_runtime.estimate.scale.scaling import peaks, scaled
from fsdp_runtime.estimate.scale.summary import Summary, starred
from fsdp_runtime.estimate.step import OPTIMIZERS, Step, trace
from fsdp_runtime.estimate.trace.collectives import traffic_of
from fsdp_runtime.estimate.trace.fake_world import fake_world
from fsdp_runtime.estimate.trace.recorder import UntraceableError
from fsdp_runtime.estimate.types import Assumed, Bytes, Estimate, Memory, Peak, Settings, Whole
from fsdp_runtime.mesh.spec import MeshSpec, axis_size
from fsdp_runtime.model.structure import inspect_model
from fsdp_runtime.parallel.lora import resolve_adapted_plan
from tp_plans import Plan, check

Progress = Callable[[str, int, int], None]

#: What is said of a part of a block that cannot be traced.
LEFT_OUT = "depends on values: the module is left out of the estimate, and hands on what it is given"

#: What stays on the host with ``offload``.
_OFFLOADED = ("parameters", "gradients", "optimizer_state")


def run(
    source: Any,
    spec: MeshSpec,
    step: Step,
    *,
    exact: bool,
    rank: int,
    device_memory: int | None,
    bandwidths: Mapping[str, float],
    progress: Progress | None,
) -> Estimate:
    """What ``estimate`` returns, from checked arguments."""
    if step.optimizer not in OPTIMIZERS:
        raise EstimateError(f"optimizer {step.optimizer!r}: write one of {', '.join(OPTIMIZERS)}")
    tell = progress or (lambda _name, _done, _all: None)
    started = time.perf_counter()
    with fake_world(spec, rank=rank) as mesh:
        tell("building the model", 0, 4)
        model = build_model(source, step.dtype)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        blocks = len(inspect_model(model).decoder)
        name = type(model).__name__
        findings, by_block = _checked(model, mesh, step)
        found = None if exact or by_block else repetition(model)
        summary, traced = _traced(model, mesh, step, found, tell)
        traffic = traffic_of(summary.calls, summary.nbytes, mesh, bandwidths)
    tell("done", 4, 4)
    settings = Settings(
        model=name,
        parameters=parameters,
        mesh=spec.sizes,
        world_size=mesh.size(),
        rank=rank,
        seq_len=step.seq_len,
        micro_batch=step.micro_batch,
        plan=plan_name(step.parallelize["plan"]),
        sequence_parallel=step.parallelize["sequence_parallel"],
        activation_checkpointing=str(step.parallelize["activation_checkpointing"]),
        dtype=dtype_name(step.dtype),
        master_dtype=None if step.master_dtype is None else dtype_name(step.master_dtype),
        optimizer=step.optimizer,
        logprobs=step.logprobs if isinstance(step.logprobs, str) else "custom",
        offload=step.offload,
        blocks=blocks,
        traced=traced,
        scaling=_scaling_told(blocks, traced, found, exact=exact, by_block=by_block),
    )
    memory = _memory(summary, offload=step.offload)
    return Estimate(
        settings=settings,
        memory=memory,
        traffic=traffic,
        flops=summary.flops,
        whole=tuple(
            Whole(pattern=pattern, count=count, nbytes=nbytes)
            for pattern, (count, nbytes) in sorted(summary.whole.items(), key=lambda item: -item[1][1])
        ),
        findings=findings,
        assumed=tuple(
            Assumed(operator=operator, module=module, assumption=told, counted=told != LEFT_OUT)
            for operator, module, told in summary.assumed
        ),
        device_memory=device_memory,
        advice=advice_for(settings, memory, device_memory),
        seconds=time.perf_counter() - started,
    )


def _traced(
    model: nn.Module, mesh: DeviceMesh, step: Step, repeated: Repetition | None, tell: Progress
) -> tuple[Summary, tuple[int, ...]]:
    """The summary of the whole model, and how many blocks each trace ran."""
    if repeated is None or not repeated.worthwhile:
        tell("tracing every block", 1, 4)
        summary = _trace_what_can_be(model, range(len(inspect_model(model).decoder)), mesh, step)
        return summary, (summary.blocks,)
    stack = inspect_model(model).decoder[0].rpartition(".")[0]
    summaries: list[Summary] = []
    for done, times in enumerate((repeated.least, repeated.least + 1), start=1):
        kept = repeated.kept(times)
        tell(f"tracing {len(kept)} of {repeated.blocks} blocks", done, 4)
        known = summaries[0].idle if summaries else frozenset()
        summaries.append(_trace_what_can_be(model, kept, mesh, step, known))

    def renamed(path: str, more: int) -> str:
        return re.sub(rf"^{re.escape(stack)}\.(\d+)", lambda found: f"{stack}.{int(found[1]) + more}", path)

    small, large = summaries
    return scaled(small, large, repeated, renamed), (small.blocks, large.blocks)


def _trace_what_can_be(
    model: nn.Module, kept: Sequence[int], mesh: DeviceMesh, step: Step, idle: frozenset[str] = frozenset()
) -> Summary:
    """The summary of some blocks; a part of a block that cannot be traced hands on what it is given, and is named.

    A model with parameters that get no gradient is traced once more, when it is known which have no optimizer state.
    """
    left_out: dict[str, str] = {}
    while True:
        fewer = with_blocks(model, kept) if len(kept) < len(inspect_model(model).decoder) else copy.deepcopy(model)
        blocks = inspect_model(fewer).decoder
        for path, module in fewer.named_modules():
            if starred(path) in left_out:
                module.forward = _hand_on
        try:
            summary = trace(fewer, mesh, step, idle)
        except UntraceableError as error:
            pattern = starred(error.module)
            if pattern in left_out or not any(error.module.startswith(f"{block}.") for block in blocks):
                raise
            left_out[pattern] = error.operator
            continue
        if summary.idle != idle and step.optimizer != "none":
            idle = summary.idle
            continue
        told = tuple((operator, pattern, LEFT_OUT) for pattern, operator in left_out.items())
        return replace(summary, assumed=(*summary.assumed, *told))


def _hand_on(first: Any, *_args: Any, **_named: Any) -> Any:
    return first


def _checked(model: nn.Module, mesh: DeviceMesh, step: Step) -> tuple[tuple[str, ...], bool]:
    """What the plan checker finds, and whether the plan says something of single blocks."""
    plan, tp = step.parallelize["plan"], axis_size(mesh, "tp")
    if plan is None or tp == 1:
        return (), False
    resolved: Plan = resolve_adapted_plan(plan, model, sequence_parallel=step.parallelize["sequence_parallel"])
    report = check(resolved, model, tp=tp)
    report.raise_on_error()
    by_block = any(part.isdigit() for pattern, _ in resolved.items() for part in pattern.split("."))
    return tuple(str(finding) for finding in report.findings), by_block


def _memory(summary: Summary, *, offload: bool) -> Memory:
    def device(nbytes: Bytes) -> Bytes:
        return _without(nbytes, _OFFLOADED) if offload else nbytes

    ends = summary.ends
    at_end = ends.get("optimizer", ends["backward"])
    host = _without(at_end, set(at_end.by_category()) - set(_OFFLOADED)) if offload else Bytes()
    phases = tuple(
        Peak(phase=phase, module=moment.module, operator=moment.operator, nbytes=device(nbytes))
        for phase, (nbytes, moment) in peaks(summary).items()
    )
    return Memory(
        held=device(_without(summary.before, ("inputs",))),
        after_forward=device(ends["forward"]),
        after_backward=device(ends["backward"]),
        phases=phases,
        host=host,
    )


def _without(nbytes: Bytes, categories: Any) -> Bytes:
    return Bytes(**{name: size for name, size in nbytes.by_category().items() if name not in categories})


def _scaling_told(
    blocks: int, traced: tuple[int, ...], repeated: Repetition | None, *, exact: bool, by_block: bool
) -> str:
    if len(traced) == 2 and repeated is not None:
        group = "block" if repeated.period == 1 else f"group of {repeated.period} blocks"
        return (
            f"{traced[0]} and {traced[1]} of {blocks} blocks were traced; what one {group} adds between the two is "
            f"added for each of the others, which are identical (blocks {repeated.start} to "
            f"{repeated.start + repeated.times * repeated.period - 1} repeat)"
        )
    if exact:
        return f"all {blocks} blocks were traced, as asked"
    if by_block:
        return f"all {blocks} blocks were traced, since the plan names single ones"
    return f"all {blocks} blocks were traced: too few of them repeat to trace fewer"
