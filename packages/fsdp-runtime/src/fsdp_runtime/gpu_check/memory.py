"""Memory and time of training steps on one device against the dry run's."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from statistics import median
from typing import Literal, NamedTuple

import torch

from fsdp_runtime.dry_run.step_time import HARDWARE, step_time
from fsdp_runtime.gpu_check.check_result import CheckResult, largest, within
from fsdp_runtime.gpu_check.machine import World, optional
from fsdp_runtime.gpu_check.step_settings import SETTINGS, StepSetting
from fsdp_runtime.meters.step_meter import synchronize

#: The dry run is expected within this part of the allocator's allocated and reserved bytes.
TOLERANCE = 0.08
#: Steps before a timed one: the first makes the optimizer's state, and a compiled one its graphs.
WARM_UP = 2
#: A small step on a CPU, and the largest relative difference of its loss: quantized weights have other values.
SMALL_TOKENS, SMALL_BOUND = (1, 16), 0.05
SMALL_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96}


class StepCost(NamedTuple):
    """The most bytes that the allocator handed out and reserved, and the seconds of a step; 0 for unknown ones."""

    allocated: int
    reserved: int
    seconds: float


def check_memory(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield bytes and seconds of every setting on one rank beside the dry run's, and the medians."""
    lacking = [name for name in ("rl_logprobs", "peft") if optional(name) is None]
    if device.type == "cpu" or lacking:
        reason = f"{' and '.join(lacking)} are not installed" if lacking else "a CPU has no allocator that counts"
        yield CheckResult("Memory", "steps against the dry run", reason, state="not run")
        yield from (small_steps(setting) for setting in SETTINGS if setting.without and not lacking)
        return
    measured: dict[str, StepCost] = {}
    for setting in SETTINGS:
        try:
            measured[setting.name] = measured_cost(setting, device)
        except torch.OutOfMemoryError:
            yield CheckResult("Memory", setting.name, "the device is too small", state="not run")
    settings = [setting for setting in SETTINGS if setting.name in measured]
    with get_context("spawn").Pool(4) as pool:  # a dry run needs a process without a process group
        costs = pool.starmap(expected_cost, [(setting, torch.cuda.get_device_name(device)) for setting in settings])
    expected = dict(zip(measured, costs, strict=True))
    for name, cost in measured.items():
        yield compared(f"{name} ({world.name})", cost, expected[name])
    yield from summary([*measured.values()], costs)
    for setting in settings:
        if setting.without in measured:
            yield lever(setting.name, measured[setting.name], setting.without, measured[setting.without])


def lever(name: str, cost: StepCost, without: str, larger: StepCost) -> CheckResult:
    """Return the bytes and the time of a lever's setting beside the setting without it; it passes with fewer bytes."""
    figures = [f"{each.allocated / 2**30:.2f} GiB, {each.seconds * 1e3:.0f} ms" for each in (cost, larger)]
    state: Literal["passed", "failed"] = "passed" if cost.allocated < larger.allocated else "failed"
    return CheckResult("Levers", name, f"{figures[0]}; {without}: {figures[1]}", "fewer bytes", state)


def small_steps(setting: StepSetting) -> CheckResult:
    """Return the losses of small steps on a CPU beside steps without the setting's lever."""
    without = next(each for each in SETTINGS if each.name == setting.without)
    losses = []
    for each in (setting, without):
        step = replace(each, tokens=SMALL_TOKENS, sizes=SMALL_SIZES).step_on(torch.device("cpu"))
        losses.append([float(step()) for _ in range(2)])
    error = largest(abs(one - other) / other for one, other in zip(*losses, strict=True))
    return within("Levers", f"{setting.name}: losses beside {setting.without}", error, SMALL_BOUND)


def expected_cost(setting: StepSetting, device_name: str = "") -> StepCost:
    """Return the dry run's bytes, and its seconds where the device's rates are known; without a process group."""
    dry_run = setting.estimate()
    hardware = next((name for name in HARDWARE if name in device_name), None)
    seconds = 0.0 if hardware is None else step_time(dry_run, hardware).expected
    return StepCost(dry_run.memory.peak.total, dry_run.memory.reserved or 0, seconds)


def measured_cost(setting: StepSetting, device: torch.device) -> StepCost:
    """Return the bytes of all steps on a device, and the seconds of the fastest of some."""
    gc.collect()  # the model of the setting before
    step = setting.step_on(device)
    torch.cuda.empty_cache()  # weights in full precision, of a base that is quantized
    torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(WARM_UP + 3):
        begin = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return StepCost(allocated, reserved, min(seconds[WARM_UP:]))


def compared(what: str, measured: StepCost, expected: StepCost) -> CheckResult:
    """Return a measured cost with the dry run's; it passes if both kinds of bytes are within ``TOLERANCE``."""
    kinds = zip(("allocated", "reserved"), measured, expected, strict=False)
    figures = [f"{kind} {nbytes / 2**30:.2f} GiB, estimate {other / nbytes - 1:+.1%}" for kind, nbytes, other in kinds]
    times = f", {measured.seconds / expected.seconds:.2f} of the expected time" if expected.seconds else ""
    errors = (abs(other / nbytes - 1) for nbytes, other in zip(measured[:2], expected[:2], strict=True))
    state: Literal["passed", "failed"] = "passed" if max(errors) <= TOLERANCE else "failed"
    figure = "; ".join([*figures, f"{measured.seconds * 1e3:.0f} ms{times}"])
    return CheckResult("Memory", what, figure, f"within {TOLERANCE:.0%}", state)


def summary(measured: Sequence[StepCost], expected: Sequence[StepCost]) -> Iterator[CheckResult]:
    """Yield the median errors of bytes, and the factor of this device for ``StepTime.expected``."""
    pairs = [*zip(measured, expected, strict=True)]
    if not pairs:
        return
    errors = [median(abs(two[at] / one[at] - 1) for one, two in pairs) for at in (0, 1)]
    figure = f"allocated {errors[0]:.1%}, reserved {errors[1]:.1%}"
    yield CheckResult("Memory", f"median error of {len(pairs)} settings", figure)
    factors = sorted(one.seconds / two.seconds for one, two in pairs if two.seconds)
    if factors:
        # A setting's own time is not among these that predict it.
        others = [median([*factors[:at], *factors[at + 1 :]] or factors) for at in range(len(factors))]
        error = median(abs(other / factor - 1) for other, factor in zip(others, factors, strict=True))
        text = f"{median(factors):.2f} ({factors[0]:.2f} to {factors[-1]:.2f}); the others' median predicts a step "
        yield CheckResult("Memory", "time over the expected time", f"{text}within {error:.0%} in the median")
