"""The random states of this rank: torch's default generators of the CPU and of a device, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime.errors import CheckpointError


@dataclass(frozen=True)
class Generators:
    """The default generators of the CPU and of this rank's device."""

    device_type: str

    def get(self) -> list[Tensor]:
        """Return the generators' states, on the CPU."""
        return [torch.get_rng_state(), *([] if self._device is None else [self._device.get_rng_state()])]

    def set(self, states: list[Tensor]) -> None:
        """Restore states that :meth:`get` returned."""
        torch.set_rng_state(states[0])
        if self._device is not None:
            self._device.set_rng_state(states[1])

    def seed(self, seed: int) -> None:
        """Seed the generators."""
        torch.default_generator.manual_seed(seed)
        if self._device is not None:
            self._device.manual_seed(seed)

    def first_of(self, group: ProcessGroup) -> list[Tensor]:
        """Return the states of a group's first rank.  Collective over the group."""
        states = [state.to(self.device_type, copy=True) for state in self.get()]
        for state in states:
            dist.broadcast(state, group=group, group_src=0)
        return [state.cpu() for state in states]

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed the generators, and restore their states at the end."""
        states = self.get()
        self.seed(seed)
        try:
            yield
        finally:
            self.set(states)

    @property
    def _device(self) -> Any:
        return None if self.device_type == "cpu" else torch.get_device_module(self.device_type)


def rng_states() -> dict[str, Any]:
    """Return the states of torch's generators (CPU, current accelerator), Python's, and NumPy's if it is imported."""
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        states[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *others = numpy.random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *others)  # pickle has no uint32 of torch
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
