"""The command ``python -m fsdp_runtime.gpu_check``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from fsdp_runtime.errors import OptionError
from fsdp_runtime.gpu_check import training
from fsdp_runtime.gpu_check.bench import bench
from fsdp_runtime.gpu_check.check_result import CheckResult, markdown, verdict
from fsdp_runtime.gpu_check.float8 import check_float8
from fsdp_runtime.gpu_check.kernels import check_kernels
from fsdp_runtime.gpu_check.machine import World, accelerator, machine, worlds
from fsdp_runtime.gpu_check.parity import BOUNDS, Setting, check_setting, settings
from fsdp_runtime.gpu_check.ranks import Check, run_checks
from fsdp_runtime.gpu_check.step_costs import check_memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks that the machine allows and write the report.

    Returns 0 if nothing failed, also without an accelerator; 1 if a check failed; 2 for wrong arguments.
    """
    options = parser().parse_args(arguments)
    device = options.device or accelerator()
    if device is None:
        print("No CUDA or ROCm device was found: nothing was checked. --device cpu runs what needs none.")
        return 0
    output = options.output or Path("gpu-bench.md" if options.bench else "gpu-check.md")
    if not output.parent.is_dir():
        print(f"gpu_check: --output {output}: {output.parent} is no directory", file=sys.stderr)
        return 2
    try:
        chosen = worlds(device, 1 if options.bench else options.max_ranks)
    except OptionError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    if options.bench:
        bench(chosen[0].device(0), output)
        print(f"{output.read_text(encoding='utf-8')}\nReport: {output}, {output.with_suffix('.json')}")
        return 0
    groups = [(world, chosen_checks(checks, world, options.only)) for world in chosen for checks in checks_of(world)]
    if not any(checks for _, checks in groups):
        print(f"gpu_check: no check for --only {options.only!r}, --max-ranks {options.max_ranks}", file=sys.stderr)
        return 2
    minutes = options.max_minutes if options.max_minutes is not None else 60.0 if device == "cpu" else 3.0
    begin = time.time()
    findings = machine(device) + _run(groups, begin + 60 * minutes)
    page = markdown(findings, time.time() - begin)
    output.write_text(page, encoding="utf-8")
    print(f"{page}\nReport: {output}")
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def chosen_checks(checks: Sequence[Check], world: World, text: str) -> list[Check]:
    """Return the checks with a text in their names, as the report prints the names."""
    return [check for check in checks if text.lower() in f"{check.section}: {check.name(world)}".lower()]


def checks_of(world: World) -> list[list[Check]]:
    """Return the checks of a world; each list runs in separate processes."""
    size, shared = world.size, world.size > world.devices
    checks = [
        Check("Parity", f"{setting}, {str(dtype).removeprefix('torch.')}", partial(check_setting, setting, dtype))
        for setting in settings(size, shared=shared)
        for dtype in BOUNDS
        if dtype == torch.float32 or (setting.half and not (shared and size > 2))
    ]
    meshes = [{"dp_shard": size}, {"tp": size}][:size] if size < 4 else [{"dp_shard": size // 2, "tp": 2}]
    checks += [Check("Training", f"steps, {Setting(mesh)}", partial(training.check_steps, mesh)) for mesh in meshes]
    if size > 1:
        routes = Check("Routes", "recorded and replayed", training.check_routes)
        return [[*checks, routes, Check("Weights", "sent, saved and loaded", training.check_weights)]]
    checks += [Check("Host waits", kind, partial(training.check_host_waits, kind)) for kind in ("dense", "mixture")]
    checks += [
        Check("Offload", "bytes", training.check_offload),
        Check("Kernels", "Triton against torch", check_kernels),
    ]
    memory = [
        Check("Memory", "steps and levers against the dry run", check_memory),
        Check("Float8", "a block beside bfloat16", check_float8),
    ]
    return [checks, memory]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    command = argparse.ArgumentParser(
        prog="python -m fsdp_runtime.gpu_check",
        description="Run parity on every axis, training, kernels, memory and weight sync on this machine's GPUs.",
    )
    command.add_argument("--device", help="cuda (ROCm too) or another accelerator; cpu runs all that needs none")
    command.add_argument("--max-ranks", type=int, default=8, metavar="N", help="the most ranks (default: 8)")
    command.add_argument("--only", default="", metavar="TEXT", help="the checks with this text in their names")
    command.add_argument("--max-minutes", type=float, help="begin no check later (default: 3; on a CPU 60)")
    command.add_argument("--bench", action="store_true", help="time one device beside other packages, five minutes")
    command.add_argument("--output", type=Path, help="the report (default: gpu-check.md, or gpu-bench.md and .json)")
    return command


def _run(groups: Sequence[tuple[World, list[Check]]], deadline: float) -> list[CheckResult]:
    """Return the findings of all groups: worlds of a single device run at a time, and the memory's group alone."""

    def run(group: tuple[World, list[Check]]) -> list[CheckResult]:
        world, checks = group
        if checks:
            print(f"{world.name}: {len(checks)} checks", file=sys.stderr, flush=True)
        return run_checks(world, checks, deadline)

    memory = [group for group in groups if group[1] and group[1][0].section == "Memory"]
    others = [group for group in groups if group not in memory]
    single = all(world.devices == 1 for world, _ in groups)
    with ThreadPoolExecutor(len(groups) if single else 1) as pool:  # small models leave most of a device idle
        findings = [finding for results in pool.map(run, others) for finding in results]
    findings += [finding for group in memory for finding in run(group)]
    print(f"  {verdict(findings)}", file=sys.stderr, flush=True)
    return findings


if __name__ == "__main__":
    sys.exit(main())
