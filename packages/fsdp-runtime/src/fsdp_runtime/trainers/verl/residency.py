"""The devices of parameters, gradients and optimizer state: verl moves them to the host between phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from fsdp_runtime import offload, onload
from fsdp_runtime.memory.offload import Part


class Residency:
    """Move parts of a model to the host and back, each part once even if verl asks again."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._away: set[Part] = set()

    def offload(self, parts: Iterable[Part]) -> None:
        """Move parts to the host that are on the device."""
        wanted = [part for part in parts if part not in self._away and (part != "optimizer" or self._optimizer)]
        if wanted:
            offload(self._model, self._optimizer, parts=wanted)
            self._away.update(wanted)

    def onload(self, parts: Iterable[Part]) -> None:
        """Move parts back that are on the host."""
        wanted = [part for part in parts if part in self._away]
        if wanted:
            onload(self._model, parts=wanted)
            self._away.difference_update(wanted)

    @contextmanager
    def present(self, *parts: Part) -> Iterator[None]:
        """Keep parts on the device inside, and move them back after."""
        away = [part for part in parts if part in self._away]
        self.onload(away)
        try:
            yield
        finally:
            self.offload(away)
