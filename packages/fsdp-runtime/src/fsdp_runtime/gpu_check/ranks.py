"""Run checks on the ranks of one world, in separate processes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.distributed_c10d import PrefixStore, Store

from fsdp_runtime.debug import register_staged_backend
from fsdp_runtime.gpu_check.check_result import CheckResult
from fsdp_runtime.gpu_check.machine import World

#: A rank that waits longer for another one raises; so does a rank that waits for others after an error of its check.
TIMEOUT, AFTER_ERROR = timedelta(seconds=120), timedelta(seconds=20)


class NotRun(Exception):  # noqa: N818  # no error
    """A check cannot run on this machine."""


@dataclass(frozen=True)
class Check:
    """A check of one world: all ranks run it, and the findings of rank 0 are reported."""

    section: str
    what: str
    call: Callable[[World, torch.device], Iterator[CheckResult]]

    def name(self, world: World) -> str:
        """Return the check's name with its world's."""
        return f"{self.what} ({world.name})"

    def result(self, world: World, figure: str, state: Any) -> CheckResult:
        """Return a finding about the check itself."""
        return CheckResult(self.section, self.name(world), figure, state=state)


def run_checks(world: World, checks: Sequence[Check], deadline: float = float("inf")) -> list[CheckResult]:
    """Return the findings of the checks on rank 0 of a world; an error of a rank is a finding.

    A check begins before ``deadline``, in seconds since the epoch.  If a process ends, new ones run the next checks.
    """
    results: list[CheckResult] = []
    while checks:
        with tempfile.TemporaryDirectory() as folder:
            failure = _failure(world, checks, folder, deadline)
            file = Path(folder, "findings")
            entries = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        results += [CheckResult(**entry) for entry in entries if isinstance(entry, dict)]
        if failure is None:
            break
        begun = max((entry for entry in entries if isinstance(entry, int)), default=len(checks) - 1)
        results.append(_show(checks[begun].result(world, failure, "failed")))
        checks = checks[begun + 1 :]
    return results


def _failure(world: World, checks: Sequence[Check], folder: str, deadline: float) -> str | None:
    """Run the processes of a world, and return the last line of an error that ended them."""
    method = "spawn"
    if world.device_type == "cpu":  # a fork of a process with a device's context would fail
        method = "forkserver"
        set_forkserver_preload([__name__, "transformers"])
    try:
        mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _run_rank, (world, checks, folder, deadline), nprocs=world.size, start_method=method
        )
    except Exception as error:  # noqa: BLE001  # every error that ended a rank belongs in the report
        return str(error).strip().splitlines()[-1]
    return None


def _run_rank(rank: int, world: World, checks: Sequence[Check], folder: str, deadline: float) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % world.devices), WORLD_SIZE=str(world.size))
    device = world.device(rank)
    torch.set_num_threads(1)  # many ranks share the host's cores
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    register_staged_backend()
    store = dist.FileStore(str(Path(folder, "store")), world.size)  # type: ignore[attr-defined]
    dist.init_process_group(world.backend, store=store, rank=rank, world_size=world.size, timeout=TIMEOUT)
    agreement = _Agreement(PrefixStore("agreement", store), rank, world.size, deadline)
    with Path(folder, "findings").open("a", buffering=1) as file:  # a line is there if the process ends after it
        for number, check in enumerate(checks):
            if rank == 0:
                file.write(f"{number}\n")
            for result in _findings(check, world, device, agreement):
                if rank == 0:
                    file.write(json.dumps(asdict(_show(result))) + "\n")
    dist.destroy_process_group()


def _findings(check: Check, world: World, device: torch.device, agreement: _Agreement) -> Iterator[CheckResult]:
    """Yield a check's findings; an error of a rank, or the end of the time, ends the check on all ranks."""
    if agreement.is_late:
        yield check.result(world, "the time is over", "not run")
        return
    results = check.call(world, device)
    while True:
        result, error, state = None, "", "failed"
        try:
            result = next(results, None)
        except NotRun as reason:
            error, state = str(reason), "not run"
        except Exception as raised:  # noqa: BLE001  # the next check goes on
            traceback.print_exc()
            error = f"rank {agreement.rank}: {type(raised).__name__}: {str(raised)[:200]}"
        if error := agreement.first_error(error):
            yield check.result(world, error, state)
            return
        if result is None:
            return
        yield result
        if agreement.is_late:
            yield check.result(world, "the time was over before its end", "not run")
            return


class _Agreement:
    """What all ranks know after each finding, by the store: the first error, and whether rank 0 finds the time over."""

    def __init__(self, store: Store, rank: int, size: int, deadline: float) -> None:
        self.store, self.rank, self.size, self.deadline = store, rank, size, deadline
        self.number = 0
        self.first_error("")

    def first_error(self, error: str) -> str:
        """Return the error of the first rank that has one, else an empty text."""
        self.number += 1
        keys = [f"{self.number}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps([error, time.time() > self.deadline]))
        try:
            self.store.wait(keys, AFTER_ERROR if error else TIMEOUT)
        except dist.DistError as waited:
            raise RuntimeError(f"{error or 'no error on this rank'}; other ranks do not arrive") from waited
        values = [json.loads(self.store.get(key)) for key in keys]
        self.is_late = values[0][1]
        return next((value[0] for value in values if value[0]), "")


def _show(result: CheckResult) -> CheckResult:
    sys.stderr.write(f"  {result.state:9} {result.section}: {result.what}: {result.figure}\n")
    sys.stderr.flush()
    return result
