"""The dry run from end to end: build the model, resolve its parallelism once, trace, scale, and collect the results."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_runtime import resolve_parallelism
from fsdp_runtime.dry_run.allocator.constants import constant_costs
from fsdp_runtime.dry_run.allocator.replay import reserved_bytes
from fsdp_runtime.dry_run.build_model import build_model
from fsdp_runtime.dry_run.parse_args import dtype_name
from fsdp_runtime.dry_run.remarks import advice_for, quantization_assumptions, untrained_assumptions
from fsdp_runtime.dry_run.scale.repeated_blocks import RepeatedBlocks, TracedModel, find_repeated_blocks
from fsdp_runtime.dry_run.scale.summary import CallKey, Summary, Tape, peaks, scale_up, wildcard
from fsdp_runtime.dry_run.stages.rank import RankTrace, sent_shapes, staged_of, trace_rank
from fsdp_runtime.dry_run.stages.replay import rank_kinds, replay
from fsdp_runtime.dry_run.step import ON_HOST, StepConfig, trace_step
from fsdp_runtime.dry_run.trace.assumed_values import assumed_exchange, routing_assumptions
from fsdp_runtime.dry_run.trace.fake_world import fake_world
from fsdp_runtime.dry_run.trace.kernels import kernels_of_attention, kernels_of_recurrences, recurrence_assumptions
from fsdp_runtime.dry_run.trace.recorder import UntraceableError
from fsdp_runtime.dry_run.types import (
    PHASES,
    Assumption,
    Estimate,
    Memory,
    MemoryBreakdown,
    PipelineRank,
    ReplicatedParameters,
    Settings,
    Traffic,
)
from fsdp_runtime.keywords import Options
from fsdp_runtime.mesh import MeshSpec
from fsdp_runtime.mesh.collectives import axis_names
from fsdp_runtime.parallelism import Parallelism
from fsdp_runtime.steps import (
    FSDP2,
    ActivationCheckpointing,
    ContextParallel,
    ExpertParallel,
    Quantized,
    TensorParallel,
)
from fsdp_runtime.steps.attention.kernels import kernels_of_device
from fsdp_runtime.wrap import replace_forward
from tp_plans import Plan

ProgressCallback = Callable[[str, int, int], None]

#: Steps that progress reports: the model, the plan, two traces (or one and its sums).
_STEPS = 4

#: The assumption about a part of a block that cannot be traced.
_LEFT_OUT = "depends on values: the module is left out of the estimate and returns its input"

#: Categories that are on the host with ``offload``.
_OFFLOADED = ("parameters", "gradients", "optimizer_state")
_STATE = ("optimizer_state",)


def run(
    source: Any, spec: MeshSpec, step: StepConfig, bandwidths: Mapping[str, float], progress: ProgressCallback | None
) -> Estimate:
    """Return the estimate, from parsed arguments; see ``estimate``."""
    exchange = assumed_exchange(step.routing)
    report = progress or (lambda _name, _done, _all: None)
    started = time.perf_counter()
    with fake_world(spec, rank=step.rank) as mesh:
        report("building the model", 0, _STEPS)
        model = build_model(source, step.dtype, step.frozen_dtype)
        report("checking the plan", 1, _STEPS)
        others = [each for each in step.options.get("steps", ()) if not isinstance(each, ExpertParallel)]
        steps = (*others, ExpertParallel(exchange))  # this exchange assumes where tokens go
        # Compiled code cannot be traced: the trace leaves out results that a compiler fuses.
        options: Options = {**step.options, "compile": False, "steps": steps}
        parallelism = resolve_parallelism(model, mesh, **options)
        full = TracedModel(model, parallelism.structure)
        with kernels_of_device("cuda"), kernels_of_recurrences(model), kernels_of_attention():
            trace = _trace(full, parallelism, step, report)
        summary = trace.summary
        traffic = _traffic(summary.traffic, mesh, bandwidths)
    report("done", _STEPS, _STEPS)
    settings = _settings(model, spec, step, trace, parallelism)
    exchanged = next(iter(parallelism.setup.expert_plan or ()), "")
    on_host = _OFFLOADED if settings.offload else _STATE if step.optimizer in ON_HOST else ()
    memory = _memory(trace, step, settings.world_size, on_host)
    segments_grow = step.allocator is not None and step.allocator.expandable_segments
    return Estimate(
        settings=settings,
        memory=memory,
        traffic=traffic,
        flops=sum(summary.flops.values()),
        flops_by_kind=dict(summary.flops),
        bytes_moved=summary.bytes_moved,
        replicated=tuple(
            ReplicatedParameters(pattern=pattern, count=count, nbytes=nbytes)
            for pattern, (count, nbytes) in sorted(summary.replicated.items(), key=lambda item: -item[1][1])
        ),
        findings=parallelism.findings,
        assumptions=(
            *summary.assumptions,
            *untrained_assumptions(model, summary.untrained, step),
            *routing_assumptions(exchange, exchanged),
            *recurrence_assumptions(model),
            *quantization_assumptions(model),
        ),
        device_memory=step.device_memory,
        advice=advice_for(settings, memory, step.device_memory, segments_grow=segments_grow),
        seconds=time.perf_counter() - started,
        pipeline=trace.pipeline,
    )


def _settings(model: nn.Module, spec: MeshSpec, step: StepConfig, trace: _Trace, parallelism: Parallelism) -> Settings:
    setup = parallelism.setup
    layers, tokens = setup.required(TensorParallel), setup.required(ContextParallel)
    sharding, recomputed = setup.required(FSDP2), setup.required(ActivationCheckpointing)
    inside = {p for path in parallelism.structure.blocks for p in model.get_submodule(path).parameters()}
    frozen = sum(p.nbytes for p in inside if p.ndim > 1 and not p.requires_grad)
    # Fields that the step and its settings share, by name; resolved values have precedence.
    as_given = {each.name: getattr(step, each.name) for each in fields(Settings) if hasattr(step, each.name)}
    resolved = {
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "mesh": {**spec.sizes, "ep": spec.ep},
        "world_size": math.prod(spec.sizes.values()),
        "plan": "none" if layers.plan is None else layers.plan if isinstance(layers.plan, str) else "custom",
        "sequence_parallel": layers.sequence_parallel,
        "context_parallel": tokens.method,
        "activation_checkpointing": str(recomputed.mode),
        "offload_activations": step.offload_activations or recomputed.offload,
        "dtype": dtype_name(step.dtype),
        "master_dtype": None if sharding.stored_dtype is None else dtype_name(sharding.stored_dtype),
        "logprobs": step.logprobs if isinstance(step.logprobs, str) else "custom",
        "offload": isinstance(sharding.offload_policy, CPUOffloadPolicy),
        "blocks": trace.summary.blocks,
        "traced": trace.traced,
        "scaling": trace.scaling,
        "frozen": frozen // math.prod(spec.sizes[axis] for axis in ("tp", "cp", "dp_shard")),
        "quantized": setup.step(Quantized) is not None,
    }
    return Settings(**as_given | resolved)


class _Trace(NamedTuple):
    summary: Summary
    traced: tuple[int, ...]
    scaling: str
    smaller: Tape | None = None  # of the smaller of two traces
    repeated: RepeatedBlocks | None = None
    pipeline: tuple[PipelineRank, ...] = ()


def _trace(full: TracedModel, parallelism: Parallelism, step: StepConfig, report: ProgressCallback) -> _Trace:
    blocks = len(full.structure.decoder)
    if parallelism.setup.meshes.pp is not None:
        return _trace_stages(full, parallelism, step, report)
    # Equal blocks may be sharded differently by rules for single blocks.
    patterns = [pattern for pattern, _ in parallelism.plan.items()] if isinstance(parallelism.plan, Plan) else []
    by_block = any(part.isdigit() for pattern in patterns for part in pattern.split("."))
    margin = int(parallelism.setup.required(ActivationCheckpointing).offload)
    repeated = None if step.exact or by_block else find_repeated_blocks(full.structure, margin)
    if repeated is None or not repeated.saves_work:
        report("tracing every block", 2, _STEPS)
        summary = _trace_traceable(full, parallelism, step)
        report("adding up", 3, _STEPS)
        reason = ": too few of them repeat to trace fewer"
        if step.exact or by_block:
            reason = ", as requested" if step.exact else ", because the plan has rules for single blocks"
        return _Trace(summary, (blocks,), f"all {blocks} blocks were traced{reason}")
    stack = full.structure.decoder[0].rpartition(".")[0]
    summaries: list[Summary] = []
    for done, count in enumerate((repeated.min_count, repeated.min_count + 1), start=2):
        indices = repeated.block_indices(count)
        report(f"tracing {len(indices)} of {repeated.blocks} blocks", done, _STEPS)
        known = frozenset(summaries[0].untrained if summaries and not step.assume_gradients else ())
        summaries.append(_trace_traceable(full.with_blocks(indices), parallelism, step, known))

    def shift_block(path: str, by: int) -> str:
        return re.sub(rf"^{re.escape(stack)}\.(\d+)", lambda match: f"{stack}.{int(match[1]) + by}", path)

    small, large = summaries
    group = "block" if repeated.period == 1 else f"group of {repeated.period} blocks"
    scaling = (
        f"{small.blocks} and {large.blocks} of {blocks} blocks were traced; the difference of one {group} is added for "
        f"each of the others, which are identical (blocks {repeated.start} to "
        f"{repeated.start + repeated.count * repeated.period - 1} repeat)"
    )
    scaled = scale_up(small, large, repeated, shift_block)
    return _Trace(scaled, (small.blocks, large.blocks), scaling, small.tape, repeated)


def _trace_stages(full: TracedModel, parallelism: Parallelism, step: StepConfig, report: ProgressCallback) -> _Trace:
    """Trace the ranks of ``pp`` that differ, and replay the schedule with the costs of all ranks."""
    staged, blocks = staged_of(parallelism), len(full.structure.decoder)
    report("finding the tensors between stages", 2, _STEPS)
    shapes = sent_shapes(full, parallelism, step)
    kinds = rank_kinds(full, staged, shapes)
    traces: list[RankTrace] = []
    for rank, kind in enumerate(kinds):
        if (first := kinds.index(kind)) < rank:
            traces.append(traces[first])
            continue
        report(f"tracing rank {rank} of pp", 3, _STEPS)
        traces.append(_trace_traceable(full, parallelism, step, trace=partial(trace_rank, rank=rank, shapes=shapes)))
    summary, rows = replay(traces, staged, shapes, blocks)
    different = len({id(trace) for trace in traces})
    worst = max(rows, key=lambda row: row.peak.total).rank
    scaling = (
        f"all blocks of {different} of {len(rows)} ranks of pp were traced, equal ranks once, and the actions of "
        f"torch's schedule were replayed with their costs; the numbers are of rank {worst} of pp, with the highest peak"
    )
    return _Trace(summary, (blocks,), scaling, pipeline=rows)


def _trace_traceable(
    template: TracedModel,
    parallelism: Parallelism,
    step: StepConfig,
    without_grad: frozenset[str] = frozenset(),
    trace: Callable[..., Any] | None = None,
) -> Any:
    """Return the result of ``trace`` on copies of a model: untraceable parts of their blocks return their input."""
    # A model with parameters without gradients is traced again once these are known, because they have no optimizer
    # state.
    left_out: dict[str, Assumption] = {}
    while True:
        traced = template.copy()
        for path, module in traced.model.named_modules():
            if wildcard(path) in left_out:
                # Blocks give their mixers the input by position or by name.
                replace_forward(module, lambda *args, **kwargs: next(iter((*args, *kwargs.values()))))
        try:
            summary: Any = (trace or trace_step)(traced, parallelism, step, without_grad)
        except UntraceableError as error:
            pattern = wildcard(error.module)
            inside_blocks = any(error.module.startswith(f"{block}.") for block in template.structure.decoder)
            if pattern in left_out or not inside_blocks:
                raise
            left_out[pattern] = Assumption(operator=error.operator, module=pattern, assumption=_LEFT_OUT, counted=False)
            continue
        unknown = summary.untrained.keys() != without_grad and not step.assume_gradients
        if unknown and step.optimizer != "none":
            without_grad = frozenset(summary.untrained)
            continue
        return replace(summary, assumptions=(*summary.assumptions, *left_out.values()))


def _memory(trace: _Trace, step: StepConfig, world_size: int, on_host: Collection[str]) -> Memory:
    """Return the bytes of the full model; ``on_host`` are the categories on the host."""
    summary, ends = trace.summary, trace.summary.ends
    at_end = ends.get("optimizer", ends["backward"])
    # Groups of ranks that communicate have a communicator each.
    groups = len({ranks for _, _, ranks in summary.traffic if len(ranks) > 1})
    constants = constant_costs(step.constants, world_size=world_size, axes=groups)
    reserved = None
    if step.allocator is not None and summary.tape:
        reserved = reserved_bytes(
            summary.tape,
            step.allocator,
            available=None if step.device_memory is None else step.device_memory - sum(constants.values()),
            smaller=trace.smaller,
            repeated=trace.repeated,
            micro_batches=step.micro_batches,
            on_host=on_host,
        )
    return Memory(
        resident=_without(summary.before, ("inputs", *on_host)),
        after_forward=_without(ends["forward"], on_host),
        after_backward=_without(ends["backward"], on_host),
        phases=tuple(replace(peak, nbytes=_without(peak.nbytes, on_host)) for peak in peaks(summary)),
        host=replace(_without(at_end, at_end.by_category().keys() - on_host), activations=summary.on_host),
        reserved=reserved,
        constants=constants,
    )


def _without(nbytes: MemoryBreakdown, categories: Iterable[str]) -> MemoryBreakdown:
    return replace(nbytes, **dict.fromkeys(categories, 0))


def _traffic(
    totals: Mapping[CallKey, tuple[int, ...]], mesh: DeviceMesh, bandwidths: Mapping[str, float]
) -> tuple[Traffic, ...]:
    """Return counts and bytes by axis, phase and kind, in that order; a bandwidth under ``""`` is for other axes."""
    axes = axis_names(mesh)
    traffic = []
    for (phase, kind, ranks), (count, nbytes, sent) in totals.items():
        axis = axes.get(ranks, "ranks " + ",".join(map(str, ranks[:4])) + (",…" if len(ranks) > 4 else ""))
        speed = bandwidths.get(axis, bandwidths.get(""))
        traffic.append(
            Traffic(
                axis=axis,
                ranks=len(ranks),
                phase=phase,
                kind=kind,
                count=count,
                nbytes=nbytes,
                bytes_sent=sent,
                seconds=None if speed is None else sent / speed,
            )
        )
    order = {axis: index for index, axis in enumerate(axes.values())}
    return tuple(sorted(traffic, key=lambda t: (order.get(t.axis, len(order)), t.axis, PHASES.index(t.phase), t.kind)))
