"""Devices and versions of this machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fsdp_runtime.errors import OptionError
from fsdp_runtime.gpu_check.check_result import CheckResult

PACKAGES = ("tp-plans", "fsdp-runtime", "rl-logprobs", "torch", "transformers", "triton")
_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True)
class World:
    """The processes of one run of checks."""

    device_type: str  # ``"cuda"`` (ROCm too), another accelerator's, or ``"cpu"``
    size: int  # number of ranks
    devices: int  # number of devices; ranks share them in turn if there are fewer

    @property
    def backend(self) -> str:
        """The accelerator's own backend if each rank has a device; for ranks that share one, the staged backend."""
        if self.device_type == "cpu" or self.size > self.devices:
            return "staged" if self.size > 1 else "gloo"
        return _BACKENDS.get(self.device_type, "gloo")

    @property
    def name(self) -> str:
        """The name of the world in the report."""
        shared = "" if self.device_type == "cpu" or self.size <= self.devices else ", sharing a device"
        return f"{self.size} rank{'s' if self.size > 1 else ''} on {self.device_type}, {self.backend}{shared}"

    def device(self, rank: int) -> torch.device:
        """Return the device of a rank."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, rank % self.devices)


def optional(name: str) -> Any:
    """Return an optional module, ``None`` if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None


def accelerator() -> str | None:
    """Return the type of this machine's accelerators, or ``None``."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def worlds(device_type: str, largest: int = 8) -> list[World]:
    """Return the worlds to check: one rank, then doubled; ranks share devices if there are fewer."""
    if device_type != "cpu" and accelerator() != device_type:
        raise OptionError(f"--device {device_type}: this machine has {accelerator() or 'no accelerator'}; use cpu")
    devices = largest if device_type == "cpu" else torch.accelerator.device_count()
    return [World(device_type, size, devices) for size in (1, 2, 4, 8) if size <= largest]


def machine(device_type: str) -> list[CheckResult]:
    """Return the devices and versions."""
    results = [CheckResult("Machine", "system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")]
    if device_type != "cpu":
        for index in range(torch.accelerator.device_count()):
            results.append(CheckResult("Machine", f"device {index}", _describe(device_type, index)))
    for package in PACKAGES:
        try:
            results.append(CheckResult("Machine", package, version(package)))
        except PackageNotFoundError:
            results.append(CheckResult("Machine", package, "not installed"))
    if device_type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        built = torch.version.hip or torch.version.cuda
        results.append(CheckResult("Machine", "CUDA or ROCm of torch, NCCL", f"{built}, {nccl}"))
    return results


def _describe(device_type: str, index: int) -> str:
    if device_type != "cuda":
        return device_type
    properties = torch.cuda.get_device_properties(index)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, {properties.multi_processor_count} processors"
    )
