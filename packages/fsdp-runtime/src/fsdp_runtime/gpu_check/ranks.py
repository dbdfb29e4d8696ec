"""Run checks on the ranks of one world, in separate processes."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fsdp_runtime.gpu_check.check_result import CheckResult
from fsdp_runtime.gpu_check.machine import World

#: A check yields findings of one rank.  All ranks run it, and the findings of rank 0 are reported.
Check = Callable[[World, torch.device], Iterator[CheckResult]]
#: A rank that waits longer for another one raises.
TIMEOUT = timedelta(seconds=120)


def run_checks(world: World, checks: list[Check], show: Callable[[str], None]) -> list[CheckResult]:
    """Return the findings of the checks on rank 0 of a world; an error of a rank is a finding."""
    with tempfile.TemporaryDirectory() as folder:
        names = ", ".join(check.__name__.removeprefix("check_") for check in checks)
        show(f"{world.name}: {names}")
        failure = ""
        try:
            mp.spawn(_run_rank, (world, checks, folder), nprocs=world.size)  # type: ignore[attr-defined, no-untyped-call]
        except Exception as error:  # noqa: BLE001  # every error that ended a rank belongs in the report
            failure = str(error).strip().splitlines()[-1]
        lines = Path(folder, "findings").read_text().splitlines() if Path(folder, "findings").exists() else []
    results = [CheckResult(**json.loads(line)) for line in lines]
    if failure:
        results.append(CheckResult("Errors", f"{world.name}: {names}", failure, "no error", "failed"))
    return results


def _run_rank(rank: int, world: World, checks: list[Check], folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world.size))
    device = world.device(rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(device.index)
    store = dist.FileStore(str(Path(folder, "store")), world.size)  # type: ignore[attr-defined]
    dist.init_process_group(world.backend, store=store, rank=rank, world_size=world.size, timeout=TIMEOUT)
    try:
        with Path(folder, "findings").open("a") as file:
            for check in checks:
                for finding in check(world, device):
                    if rank == 0:
                        file.write(json.dumps(asdict(finding)) + "\n")
                        file.flush()
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()
