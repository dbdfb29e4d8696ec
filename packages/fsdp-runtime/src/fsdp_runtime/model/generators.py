"""The random states of this rank: torch's default generators of the CPU and of a mesh's device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


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
