"""The command ``python -m fsdp_runtime.gpu_check``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fsdp_runtime.errors import OptionError
from fsdp_runtime.gpu_check.bench import bench
from fsdp_runtime.gpu_check.check_result import CheckResult, markdown, verdict
from fsdp_runtime.gpu_check.kernels import check_kernels
from fsdp_runtime.gpu_check.machine import World, accelerator, machine, worlds
from fsdp_runtime.gpu_check.memory import check_memory
from fsdp_runtime.gpu_check.parity import check_parity, check_transfer
from fsdp_runtime.gpu_check.ranks import Check, run_checks
from fsdp_runtime.gpu_check.speed import check_speed

#: The checks of a world of one rank, and of every larger world; each list runs in separate processes.
ALONE: list[list[Check]] = [[check_memory], [check_kernels, check_speed, check_parity]]
TOGETHER: list[list[Check]] = [[check_parity, check_transfer]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks that the machine allows and write the report.

    Returns 0 if nothing failed, also without an accelerator; 1 if a check failed; 2 for wrong arguments.
    """
    options = parser().parse_args(arguments)
    device = options.device or accelerator()
    if device is None:
        print("No CUDA or ROCm device was found: nothing was checked. --device cpu runs what needs none.")
        return 0
    if options.bench:
        return _bench(device, options.output or Path("gpu-bench.md"))
    try:
        chosen = worlds(device, options.max_ranks)
    except OptionError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    findings = machine(device)
    for world in chosen:
        alone = ALONE if world.device_type != "cpu" else [[check for checks in ALONE for check in checks]]
        for checks in TOGETHER if world.size > 1 else alone:  # on a CPU no allocator counts, and all share processes
            findings += _run(world, checks)
    page = markdown(findings)
    output = options.output or Path("gpu-check.md")
    output.write_text(page, encoding="utf-8")
    print(f"{page}\nReport: {output}")
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    command = argparse.ArgumentParser(
        prog="python -m fsdp_runtime.gpu_check",
        description="Run parity on every axis, kernels, memory, speed and weight sync on this machine's GPUs.",
    )
    command.add_argument("--device", help="cuda (ROCm too) or another accelerator; cpu runs all that needs none")
    command.add_argument("--max-ranks", type=int, default=8, metavar="N", help="the most ranks (default: 8)")
    command.add_argument("--bench", action="store_true", help="time one device beside other packages, five minutes")
    command.add_argument("--output", type=Path, help="the report (default: gpu-check.md, or gpu-bench.md and .json)")
    return command


def _bench(device: str, output: Path) -> int:
    try:
        worlds(device, 1)
    except OptionError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    bench(torch.device(device, 0) if device != "cpu" else torch.device("cpu"), output)
    print(f"{output.read_text(encoding='utf-8')}\nReport: {output}, {output.with_suffix('.json')}")
    return 0


def _run(world: World, checks: list[Check]) -> list[CheckResult]:
    results = run_checks(world, checks, lambda line: print(line, file=sys.stderr, flush=True))
    if world.backend == "gloo" and world.device_type != "cpu":  # gloo has few collectives of tensors on a device
        results = [
            replace(f, figure=f"{f.figure} (gloo on a device)", state="not run") if f.state == "failed" else f
            for f in results
        ]
    lines = [f"  {verdict(results)}", *(f"  failed: {f.what}: {f.figure}" for f in results if f.state == "failed")]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
