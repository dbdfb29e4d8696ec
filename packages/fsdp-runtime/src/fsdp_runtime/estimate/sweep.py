"""Many dry runs, to compare ways to train a model on the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fsdp_runtime.errors import EstimateError, FsdpRuntimeError
from fsdp_runtime.estimate.api import estimate
from fsdp_runtime.estimate.candidates import Candidate, Sweep, candidates, meshes, ranked
from fsdp_runtime.estimate.report.format import parse_flops
from fsdp_runtime.estimate.types import Estimate
from tp_plans import TpPlansError


def sweep(
    model: str | Path | Any,
    world_size: int,
    *,
    max_tp: int = 8,
    cp: Sequence[int] = (1,),
    dp_replicate: Sequence[int] | None = None,
    sequence_parallel: Sequence[bool] = (False, True),
    activation_checkpointing: Sequence[str] = ("none", "selective", "block"),
    device_flops: float | str | None = None,
    workers: int = 2,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Sweep:
    """Estimate every mesh of so many ranks, with and without sequence parallelism and checkpointing, and rank them.

    What fits comes first.  With bandwidths, or the speed of a device, candidates are then ordered by seconds per token:
    the traffic's floor plus the operations (those that are recomputed too) at that speed, nothing overlapped.  Without
    either they are ordered by peak memory, then by bytes sent per token.  Each dry run has a process of the pool to
    itself; a script that calls this needs the usual ``if __name__ == "__main__"``.

    Args:
        model: as for ``estimate``; what processes of their own can be sent, so no lambda.
        world_size: ranks.
        max_tp: the ranks of a node, which ``tp`` stays within.
        cp: sizes of the context-parallel axis.
        dp_replicate: numbers of replicas; by default one, and as many as leave each replica one node.
        sequence_parallel: what to try.
        activation_checkpointing: the modes to try.
        device_flops: operations that a device really does in a second, as ``"400TFLOP/s"``.
        workers: processes at once; 0 runs all in this one.
        progress: is called with a candidate's label, how many are done and how many there are.
        options: ``seq_len``, ``bandwidth``, ``device_memory`` and others, as for ``estimate``.

    Returns:
        All candidates, best first; those that the model or its plan refuses come last, with the reason.

    Raises:
        EstimateError: no mesh has so many ranks, or a value is not understood.
    """
    specs = meshes(world_size, max_tp=max_tp, cp=cp, dp_replicate=dp_replicate)
    waiting = candidates(specs, sequence_parallel=sequence_parallel, activation_checkpointing=activation_checkpointing)
    if not waiting:
        raise EstimateError(
            f"no mesh of {world_size} ranks has tp <= {max_tp}, cp in {tuple(cp)} and dp_replicate in "
            f"{tuple(dp_replicate or ())}: give sizes that divide {world_size}, and both values of sequence_parallel"
        )
    speed = None if device_flops is None else parse_flops(device_flops)
    found = []
    for candidate, outcome in _outcomes(partial(_attempt, model, options), waiting, workers):
        if isinstance(outcome, str):
            found.append(replace(candidate, refusal=outcome))
        else:
            found.append(candidate.with_estimate(outcome, device_flops=speed))
        if progress is not None:
            progress(candidate.label, len(found), len(waiting))
    return ranked(world_size, found)


def _attempt(model: Any, options: Mapping[str, Any], candidate: Candidate) -> Estimate | str:
    """The estimate of one candidate, or why there is none."""
    try:
        return estimate(
            model,
            candidate.mesh,
            sequence_parallel=candidate.sequence_parallel,
            activation_checkpointing=candidate.activation_checkpointing,  # type: ignore[arg-type]  # checked there
            **options,
        )
    except (FsdpRuntimeError, TpPlansError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # an operator that fails on one mesh must not cost the other estimates
        return f"{type(error).__name__}: {error}"


def _outcomes(
    attempt: Callable[[Candidate], Estimate | str], waiting: Sequence[Candidate], workers: int
) -> Iterator[tuple[Candidate, Estimate | str]]:
    if workers == 0:
        yield from ((candidate, attempt(candidate)) for candidate in waiting)
        return
    lost = []
    with _pool(workers) as pool:
        running: dict[Future[Estimate | str], Candidate] = {pool.submit(attempt, each): each for each in waiting}
        try:
            for future in as_completed(running):
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    lost.append(running[future])
                else:
                    yield running[future], outcome
        finally:
            pool.shutdown(cancel_futures=True)
    # A process that dies (of memory, say) takes all that were waiting with it, and does not say which killed it.
    for candidate in lost:
        yield candidate, _alone(attempt, candidate)


def _alone(attempt: Callable[[Candidate], Estimate | str], candidate: Candidate) -> Estimate | str:
    with _pool(1) as pool:
        try:
            return pool.submit(attempt, candidate).result()
        except BrokenProcessPool:
            return "the process that estimated it died, perhaps for lack of memory"


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
