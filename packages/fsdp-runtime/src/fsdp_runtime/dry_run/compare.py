"""Compare meshes of a number of ranks, with options, by many dry runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fsdp_runtime.dry_run.api import estimate
from fsdp_runtime.dry_run.parse_args import parse_flops, require_model_source
from fsdp_runtime.dry_run.step_time import HARDWARE
from fsdp_runtime.dry_run.sweep_types import Candidate, Sweep
from fsdp_runtime.dry_run.types import Estimate, axes_without_bandwidth
from fsdp_runtime.errors import EstimateError, FsdpRuntimeError
from fsdp_runtime.mesh import MeshSpec
from tp_plans import TpPlansError

#: Seconds that a dry run takes on one core: of a dense model of some billion parameters, and of a large mixture.
_SECONDS_OF_A_DRY_RUN = (10, 120)


def sweep(
    model: str | Path | Any,
    world_size: int,
    *,
    max_tp: int = 8,
    cp: Sequence[int] = (1,),
    dp_replicate: Sequence[int] | None = None,
    ep: Sequence[int] = (1,),
    sequence_parallel: Sequence[bool] = (False, True),
    activation_checkpointing: Sequence[str] = ("none", "selective", "block"),
    context_parallel: Sequence[str] = ("allgather",),
    device_flops: float | str | None = None,
    hardware: str | None = None,
    enough: int | None = None,
    workers: int = 2,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Sweep:
    """Estimate every mesh of ``world_size`` ranks, with and without sequence parallelism and checkpointing; rank them.

    Fitting candidates come first.  With bandwidths, or the speed of a device, the order is by seconds per token without
    overlap, else by device memory, then by bytes sent per token.  Each dry run uses a process of a pool; a script that
    calls this function needs the usual ``if __name__ == "__main__"``.

    Args:
        model: a ``config.json``, a directory with one, a Hugging Face config, or a function without arguments that
            builds any model; it is sent to other processes, so lambdas do not work.
        world_size: number of ranks.
        max_tp: number of ranks of a node, the largest size of ``tp``.
        cp: sizes of the context-parallel axis.
        dp_replicate: numbers of replicas; by default 1, and the number that gives each replica one node.
        ep: sizes of the axis that a mixture's experts are divided over.
        sequence_parallel: the values to try.
        activation_checkpointing: the modes to try.
        context_parallel: the attention methods to try on meshes with ``cp``.
        device_flops: operations per second that a device achieves, such as ``"400TFLOP/s"``.
        hardware: ``"A100"``, ``"H100"``, ``"H200"`` or ``"B200"``: order by the expected time on it (``step_time``).
        enough: stop after so many meshes that fit, the least divided ones first, and leave out those that cannot fit by
            earlier dry runs: state is as large on any mesh, and ``tp`` and ``cp`` divide the rest by no more
            than their sizes; by default all run.
        workers: number of processes; 0 runs all dry runs in this process.
        progress: called first with the expected time, then after each candidate with its label,
            the number of finished candidates and the number of all.
        options: other arguments of :func:`estimate`: ``seq_len``, ``bandwidth``, ``device_memory``, …

    Returns:
        All candidates, best first; candidates that the model or its plan does not allow come last, with the error.

    Raises:
        EstimateError: no mesh has this number of ranks, or a value is not valid.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.dry_run import sweep
        >>> def build():
        ...     blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(2)))
        ...     return nn.Sequential(nn.Embedding(32, 16), blocks)
        >>> def loss(model, inputs):
        ...     return model(inputs["input_ids"]).square().mean()
        >>> options = {"seq_len": 8, "plan": None, "logprobs": loss, "clip": False}
        >>> results = sweep(build, 2, max_tp=1, activation_checkpointing=("none",), workers=0, **options)
        >>> results.best.label
        'dp_replicate=2'
    """
    require_model_source(model)  # here rather than once in every process
    specs = candidate_meshes(world_size, max_tp=max_tp, cp=cp, dp_replicate=dp_replicate, ep=ep)
    waiting = make_candidates(specs, sequence_parallel, activation_checkpointing, context_parallel)
    if not waiting:
        raise EstimateError(
            f"no mesh of {world_size} ranks has tp <= {max_tp}, cp in {tuple(cp)}, dp_replicate in "
            f"{tuple(dp_replicate or ())} and ep in {tuple(ep)}: give sizes that divide {world_size}, and both "
            "values of sequence_parallel"
        )
    if hardware is not None and hardware not in HARDWARE:
        raise EstimateError(f"hardware={hardware!r}: write one of {', '.join(HARDWARE)}")
    speed = None if device_flops is None else parse_flops(device_flops)
    report = progress or (lambda _name, _done, _all: None)
    shortest, longest = (len(waiting) * seconds / max(workers, 1) / 60 for seconds in _SECONDS_OF_A_DRY_RUN)
    several = f"{len(waiting)} dry runs, {max(workers, 1)} at a time"
    report(f"{several}: {max(1, round(shortest))} to {max(1, round(longest))} minutes", 0, len(waiting))
    if enough is not None:
        waiting.sort(key=lambda each: (each.mesh.tp * each.mesh.cp, each.mesh.tp))
    candidates: list[Candidate] = []

    def is_needed(candidate: Candidate) -> bool:
        return enough is None or (
            sum(each.estimate is not None and each.estimate.fits is True for each in candidates) < enough
            and not any(_is_larger(each, candidate) for each in candidates)
        )

    for candidate, outcome in _outcomes(partial(_attempt, model, options), waiting, workers, is_needed):
        if isinstance(outcome, str):
            candidates.append(replace(candidate, error=outcome))
        else:
            candidates.append(candidate.with_estimate(outcome, device_flops=speed, hardware=hardware))
        report(candidate.label, len(candidates), len(waiting))
    return rank_candidates(world_size, candidates)


#: The margin of a bound on a mesh's memory for rounding and uneven parts.
_SLACK = 0.95


def _is_larger(tried: Candidate, candidate: Candidate) -> bool:
    """Return whether a mesh's memory shows that another mesh, divided at least as much, does not fit either."""
    # The state is divided over all ranks of any mesh; all else at most over the ranks of ``tp`` and ``cp``.
    estimate = tried.estimate
    if estimate is None or estimate.device_memory is None or tried.mesh.ep != candidate.mesh.ep:
        return False
    state = estimate.memory.resident.total
    divided = candidate.mesh.tp * candidate.mesh.cp / (tried.mesh.tp * tried.mesh.cp)
    least = state + (estimate.memory.device - state) / divided
    return divided >= 1 and _SLACK * least > estimate.device_memory


def _attempt(model: Any, options: Mapping[str, Any], candidate: Candidate) -> Estimate | str:
    names = ("sequence_parallel", "activation_checkpointing", "context_parallel")
    try:
        return estimate(model, candidate.mesh, **{name: getattr(candidate, name) for name in names}, **options)
    except (FsdpRuntimeError, TpPlansError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # an operator that fails on one mesh must not stop the other estimates
        return f"{type(error).__name__}: {error}"


def _outcomes(
    attempt: Callable[[Candidate], Estimate | str],
    waiting: Sequence[Candidate],
    workers: int,
    is_needed: Callable[[Candidate], bool],
) -> Iterator[tuple[Candidate, Estimate | str]]:
    if workers == 0:
        yield from ((candidate, attempt(candidate)) for candidate in waiting if is_needed(candidate))
        return
    broken = []
    with _pool(workers) as pool:
        running: dict[Future[Estimate | str], Candidate] = {pool.submit(attempt, each): each for each in waiting}
        try:
            for future in as_completed(running):
                if future.cancelled():
                    continue
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    broken.append(running[future])
                    continue
                yield running[future], outcome
                for later, candidate in running.items():
                    if not is_needed(candidate):
                        later.cancel()
        finally:
            pool.shutdown(cancel_futures=True)
    # When a process dies (for lack of memory, say), the pool fails all waiting candidates, whichever killed it.
    for candidate in broken:
        with _pool(1) as pool:
            try:
                yield candidate, pool.submit(attempt, candidate).result()
            except BrokenProcessPool:
                yield candidate, "the process that estimated it died, perhaps for lack of memory"


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


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
