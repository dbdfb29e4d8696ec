"""The states of a process's random number generators."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_states() -> dict[str, Any]:
    """Return the states of torch's generators (CPU, current accelerator), Python's, and NumPy's if it is imported."""
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        states[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *others = numpy.random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.copy()), *others)
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore the states that :func:`rng_states` returned; those of absent devices are skipped."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["cpu"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in states:
        torch.get_device_module(accelerator).set_rng_state(states[accelerator.type])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *others = states["numpy"]
        numpy.random.set_state((name, keys.numpy(), *others))
