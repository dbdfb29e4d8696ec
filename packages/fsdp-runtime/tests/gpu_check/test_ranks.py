"""Checks on ranks: an error, the end of a process and the end of the time are findings, and the next check runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from fsdp_runtime.gpu_check import ranks
from fsdp_runtime.gpu_check.check_result import CheckResult
from fsdp_runtime.gpu_check.machine import World
from fsdp_runtime.gpu_check.ranks import Check, NotRun, run_checks
from harness.processes import preloaded_context

WORLD = World("cpu", 2, 1)  # ranks that share a device


def _passes(world: World, device: torch.device) -> Iterator[CheckResult]:
    total = torch.tensor([1 + int(os.environ["LOCAL_RANK"])], device=device)  # 0 is the only device
    dist.all_reduce(total)
    yield CheckResult("Sums", "first", f"{total.item()} by {dist.get_backend()}", state="passed")
    yield CheckResult("Sums", "second", "again", state="passed")


def _raises_everywhere(world: World, device: torch.device) -> Iterator[CheckResult]:
    yield CheckResult("Errors", "before", "fine", state="passed")
    raise ValueError(f"of rank {dist.get_rank()}")


def _cannot_run(world: World, device: torch.device) -> Iterator[CheckResult]:
    raise NotRun("no such kernel")
    yield


def _raises_on_the_second_rank(world: World, device: torch.device) -> Iterator[CheckResult]:
    if dist.get_rank() == 1:
        raise ValueError("alone")
    yield CheckResult("Errors", "one rank", "fine", state="passed")


def _ends_the_second_rank(world: World, device: torch.device) -> Iterator[CheckResult]:
    if dist.get_rank() == 1:
        sys.stdout.flush()
        os._exit(3)
    dist.barrier()
    yield CheckResult("Errors", "unreachable", "", state="passed")


CHECKS = {
    "raises": _raises_everywhere,
    "cannot run": _cannot_run,
    "raises on one rank": _raises_on_the_second_rank,
    "ends a rank": _ends_the_second_rank,
    "passes": _passes,
}


def test_run_checks_reports_errors_and_goes_on(capfd) -> None:
    preloaded_context()
    results = run_checks(WORLD, [Check("Errors", name, call) for name, call in CHECKS.items()])
    found = [(result.what.partition(" (")[0], result.state, result.figure) for result in results]
    assert found[:5] == [
        ("before", "passed", "fine"),
        ("raises", "failed", "rank 0: ValueError: of rank 0"),
        ("cannot run", "not run", "no such kernel"),
        ("raises on one rank", "failed", "rank 1: ValueError: alone"),
        ("ends a rank", "failed", "process 1 terminated with exit code 3"),
    ]
    assert found[5:] == [("first", "passed", "2 by staged"), ("second", "passed", "again")]
    assert "failed    Errors: ends a rank (2 ranks on cpu, staged): process 1" in capfd.readouterr().err


def test_run_checks_begins_no_check_after_its_deadline() -> None:
    preloaded_context()
    (result,) = run_checks(WORLD, [Check("Sums", "late", _passes)], deadline=0.0)
    assert (result.state, result.figure) == ("not run", "the time is over")


def test_an_error_is_raised_if_other_ranks_do_not_arrive(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "AFTER_ERROR", timedelta(milliseconds=50))
    store = dist.HashStore()
    agreements: list[ranks._Agreement] = []
    threads = [Thread(target=lambda r=r: agreements.append(ranks._Agreement(store, r, 2, 0.0))) for r in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = min(agreements, key=lambda agreement: agreement.rank)
    with pytest.raises(RuntimeError, match="no kernel; other ranks do not arrive"):
        first.first_error("no kernel")
