"""Ranks to split a model over: an existing mesh's ranks, or new CPU processes of this machine."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tp_plans.errors import CapabilityError, ModelError, PlanError, type_name

Work = Callable[[DeviceMesh], list[Any]]

#: Seconds that a collective waits for its peers, and a caller for the next rank that answers.
_TIMEOUT = 300

#: Seconds for forked ranks to meet, and the number of attempts.
_START_TIMEOUT, _STARTS = 60, 3


def on_new_ranks(work: Work, tp: int) -> list[Any]:
    """Run a function in ``tp`` forked processes, each a rank of a gloo mesh, and return the results in rank order."""
    # Forked, so that a model need not be pickled: it may be of a class that is defined in a script or a notebook.
    if (reason := why_no_new_ranks()) is not None:
        raise CapabilityError(reason)
    # A process that is forked while another thread of its parent holds a lock never gets that lock, so it may hang.
    for _ in range(_STARTS):
        with tempfile.TemporaryDirectory() as folder, _forked(work, tp, folder) as ranks:
            if _answers(ranks, _START_TIMEOUT) is not None:
                if (results := _answers(ranks, _TIMEOUT)) is None:
                    raise ModelError(f"the ranks did not answer in {_TIMEOUT} seconds; stderr has their stacks")
                return results
    raise ModelError(
        f"{tp} forked ranks did not start in {_STARTS} times {_START_TIMEOUT} seconds: verify the plan in a process "
        "with fewer threads, as with tp-plans verify on the command line"
    )


@contextmanager
def _forked(work: Work, tp: int, folder: str) -> Iterator[list[Connection]]:
    """Fork ranks, yield a connection to each, and end them afterwards."""
    context = multiprocessing.get_context("fork")
    processes, connections = [], []
    try:
        for rank in range(tp):
            here, there = context.Pipe(duplex=False)
            connections.append(here)
            processes.append(context.Process(target=_serve, args=(work, rank, tp, str(Path(folder) / "store"), there)))
            processes[-1].start()
            there.close()
        yield connections
    finally:
        for connection in connections:
            connection.close()
        for process in processes:  # each has answered, or never will
            process.kill()
            process.join()


def why_no_new_ranks() -> str | None:
    """Return why this process cannot start ranks, with the fix; ``None`` where it can."""
    if dist.is_initialized():
        return "this process is a rank already: give its mesh to split the model over, as mesh=mesh['tp']"
    used_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used_cuda or "fork" not in multiprocessing.get_all_start_methods():
        return (
            "new ranks are forked, which a process that has used CUDA cannot be: verify the plan before, with tp-plans "
            "verify on the command line, or give a mesh"
        )
    return None


def _answers(ranks: Sequence[Connection], seconds: float) -> list[Any] | None:
    """Return the next message of each rank; ``None`` if no rank sends a message for so many seconds."""
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        ready = wait([each for rank, each in enumerate(ranks) if rank not in answers], seconds)
        if not ready:
            return None
        for rank, connection in enumerate(ranks):
            if connection in ready:
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    raise ModelError(f"the process of rank {rank} ended without a result") from None
    return [answers[rank] for rank in range(len(ranks))]


def _serve(work: Work, rank: int, tp: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads that its parent's operators used
    faulthandler.dump_traceback_later(0.9 * _START_TIMEOUT, file=2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=tp, timeout=timedelta(seconds=_TIMEOUT)
    )
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    connection.send("started")
    faulthandler.dump_traceback_later(0.9 * _TIMEOUT, file=2)
    result = work(mesh)
    connection.send(result)
    connection.close()
    # Others may wait in a collective: an end of this process ends it, as it must after an error and must not else.
    failed = any(differences.error for differences in result)
    if not failed and (caller := multiprocessing.parent_process()) is not None:
        caller.join()
    os._exit(0)  # the parent's exit handlers must not run here


def on_ranks_of(mesh: DeviceMesh, work: Work) -> list[Any]:
    """Run a function on every rank of a mesh, which all have to call this, and return all results on each."""
    group = mesh.get_group()
    results: list[Any] = [None] * mesh.size()
    dist.all_gather_object(results, work(mesh), group=group)
    return results


def require_axis(mesh: object) -> None:
    """Check that a mesh is ``None``, or has one axis."""
    if mesh is not None and not (isinstance(mesh, DeviceMesh) and mesh.ndim == 1):
        raise PlanError(
            f"mesh is of type {type_name(mesh)}, or has several axes: give one axis, as mesh['tp'], or None"
        )


def computes(mesh: DeviceMesh) -> bool:
    """Return whether a mesh's collectives compute results; a simulated world's, as in a dry run, do not."""
    return dist.get_backend(mesh.get_group()) != "fake"
