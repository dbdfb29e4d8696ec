"""A stand-in for the copy stream of an accelerator: copies run only when an event behind them is waited for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime.memory.host_copies import HostCopies


class LazyCopies(HostCopies):
    """Copies that are queued.  A missing wait leaves NaN in the target; ``faults`` names copies that ran too late."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.faults: list[str] = []
        self.log: list[str] = []
        self.finished = 0

    def empty(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.log.append("copy")
        self.queue.append(partial(target.copy_, source))

    def to_host(self, source: Tensor) -> Tensor:
        self.log.append("to host")
        return self._copied(source, "")

    def to_device(self, host: Tensor) -> Tensor:
        self.log.append("to device")
        return self._copied(host, "the target was freed before its copy")

    def _copied(self, source: Tensor, freed: str) -> Tensor:
        target = torch.full_like(source, torch.nan if source.is_floating_point() else 0)
        self.queue.append(partial(self._run, weakref.ref(target), weakref.ref(source), source._version, freed))
        return target

    def _run(self, target: Any, source: Any, version: int, freed: str) -> None:
        if target() is None:  # memory of the device may belong to another tensor by now; pinned memory waits
            self.faults += [freed] if freed else []
            return
        if source() is None or source()._version != version:
            self.faults.append("the source was freed" if source() is None else "the source was written")
            return
        target().copy_(source())

    def record(self) -> int:
        return self.finished + len(self.queue)

    def wait(self, event: int) -> None:
        while self.finished < event:
            self.queue.pop(0)()
            self.finished += 1

    synchronize = wait
