"""The states of a process's random number generators."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

from fsdp_runtime.errors import CheckpointError


def rng_states() -> dict[str, Any]:
    """Return the states of torch's generators (CPU, current accelerator), Python's, and NumPy's if it is imported."""
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        states[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *others = numpy.random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.copy()), *others)
    return states


def require_rng_states(path: Path, states: dict[str, Any]) -> None:
    """Raise :class:`CheckpointError` unless new CPU generators accept the states."""
    try:
        version, internal, gauss = states["python"]
        random.Random().setstate((version, tuple(internal), gauss))
        torch.Generator().set_state(states["cpu"])
        if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *others = states["numpy"]
            numpy.random.RandomState().set_state((name, keys.numpy(), *others))
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} has no states of generators ({error!r}): resume from an older state") from error


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore a result of :func:`rng_states`; states of absent devices are skipped."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["cpu"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in states:
        torch.get_device_module(accelerator).set_rng_state(states[accelerator.type])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *others = states["numpy"]
        numpy.random.set_state((name, keys.numpy(), *others))
