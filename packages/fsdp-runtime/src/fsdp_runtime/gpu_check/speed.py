"""Gradient norm and log-probabilities against a copy of as many bytes, the limit of the memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import nn

from fsdp_runtime.gpu_check.check_result import CheckResult
from fsdp_runtime.gpu_check.machine import World, optional
from fsdp_runtime.meters.step_meter import synchronize

REPEATS = 10
#: Elements of a gradient; rows and columns of logits.  A CPU is given 1/64.
GRADIENT, ROWS, COLUMNS = 2**28, 2048, 151_936


def check_speed(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield GiB/s of a copy, of the norm of gradients in bfloat16, and of log-probabilities of logits in bfloat16."""
    rl_logprobs = optional("rl_logprobs")
    if rl_logprobs is None:
        yield CheckResult("Speed", "norm and log-probabilities", "rl-logprobs is not installed", state="not run")
        return
    share = 64 if device.type == "cpu" else 1
    copied = yield from _copy_and_norm(rl_logprobs.grad_norm, GRADIENT // share, world, device)
    logits = torch.randn(ROWS // share, COLUMNS, dtype=torch.bfloat16, device=device)
    targets = torch.zeros(len(logits), dtype=torch.long, device=device)
    for backend in ("torch", "triton"):
        if backend == "triton" and device.type == "cpu":
            yield CheckResult("Speed", "log-probabilities, triton", "Triton needs an accelerator", state="not run")
            continue

        def score(backend: Any = backend) -> Any:
            return rl_logprobs.token_logprobs(logits, targets, backend=backend)

        rate = logits.numel() * logits.element_size() / seconds(score, device)
        yield _beside(f"log-probabilities, {backend}", rate, copied, world)


def _copy_and_norm(
    grad_norm: Callable[..., Any], elements: int, world: World, device: torch.device
) -> Generator[CheckResult, None, float]:
    """Yield the speed of a copy and of a norm; return the copy's, in bytes read and written a second."""
    source = torch.ones(elements, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
    yield CheckResult("Speed", f"copy of bfloat16 ({world.name})", f"{copied / 2**30:.1f} GiB/s")
    parameters = [nn.Parameter(part) for part in source.chunk(64)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    rate = source.nbytes / seconds(lambda: grad_norm(parameters), device)
    yield _beside("gradient norm of 64 tensors", rate, copied, world)
    return copied


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest time of some runs of a call, synchronized after every run."""
    call()
    best = float("inf")
    for _ in range(REPEATS):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best


def _beside(what: str, rate: float, copied: float, world: World) -> CheckResult:
    return CheckResult("Speed", f"{what} ({world.name})", f"{rate / 2**30:.1f} GiB/s, {rate / copied:.2f} of a copy")
