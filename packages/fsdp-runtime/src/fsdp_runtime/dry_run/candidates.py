"""The candidates of a sweep: meshes of a number of ranks with options, and their ranking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from fsdp_runtime.dry_run.sweep_types import Candidate, Sweep
from fsdp_runtime.dry_run.traffic_totals import axes_without_bandwidth
from fsdp_runtime.errors import EstimateError
from fsdp_runtime.mesh import MeshSpec


def candidate_meshes(
    world_size: int,
    *,
    max_tp: int = 8,
    cp: Sequence[int] = (1,),
    dp_replicate: Sequence[int] | None = None,
    ep: Sequence[int] = (1,),
) -> list[MeshSpec]:
    """Return the meshes of ``world_size`` ranks on nodes of ``max_tp`` ranks."""
    # By default one replica, and the number that gives each replica one node (HSDP).
    given = {"world_size": [world_size], "max_tp": [max_tp], "cp": cp, "dp_replicate": dp_replicate, "ep": ep}
    for name, sizes in given.items():
        if wrong := [size for size in sizes or () if size < 1]:
            raise EstimateError(f"{name}={wrong[0]}: give a positive integer")
    meshes: list[MeshSpec] = []
    for tp, context in product(range(1, max_tp + 1), cp):
        if world_size % (tp * context):
            continue
        data = world_size // (tp * context)
        per_node = max(max_tp // (tp * context), 1)
        choices = dp_replicate or (1, *([data // per_node] if data % per_node == 0 else []))
        meshes += [
            MeshSpec(dp_replicate=replicas, dp_shard=data // replicas, cp=context, tp=tp, ep=experts)
            for replicas in dict.fromkeys(choices)
            for experts in dict.fromkeys(ep)
            if data % replicas == 0 and world_size // replicas % experts == 0
        ]
    return meshes


def make_candidates(
    specs: Iterable[MeshSpec],
    *,
    sequence_parallel: Sequence[bool],
    activation_checkpointing: Sequence[str],
    context_parallel: Sequence[str] = ("allgather",),
) -> list[Candidate]:
    """Return every mesh with every option; options of ``tp`` and ``cp`` only where the axis has several ranks."""
    return [
        Candidate(mesh=spec, sequence_parallel=sp, activation_checkpointing=mode, context_parallel=way)
        for spec in specs
        for sp in (dict.fromkeys(sequence_parallel) if spec.tp > 1 else (False,))
        for mode in dict.fromkeys(activation_checkpointing)
        for way in (dict.fromkeys(context_parallel) if spec.cp > 1 else ("allgather",))
    ]


def rank_candidates(world_size: int, candidates: Iterable[Candidate]) -> Sweep:
    """Order candidates: fitting ones first, then the fastest; without speeds, least memory, then least bytes sent."""
    # Times are lower bounds (no overlap, no waiting) per token, because meshes differ in the tokens of a step; they
    # order candidates and do not predict a step. Axes without a bandwidth would count as free, so candidates that use
    # one come after those that do not.
    known = list(candidates)
    timed = any(candidate.seconds is not None for candidate in known)

    def sort_key(candidate: Candidate) -> tuple[float, ...]:
        estimate = candidate.estimate
        if estimate is None:
            return (2.0,)
        fits = 1.0 if estimate.fits is False else 0.0
        memory, work = float(estimate.memory.device), estimate.flops / candidate.tokens
        if timed:
            unknown = float(bool(axes_without_bandwidth(estimate.traffic)))
            return fits, unknown, candidate.seconds or 0.0, work, memory
        return fits, memory, candidate.bytes_sent, work

    by = "seconds per token (no overlap), then operations" if timed else "device memory, then bytes sent per token"
    return Sweep(world_size=world_size, candidates=tuple(sorted(known, key=sort_key)), ranked_by=f"fits, then {by}")
