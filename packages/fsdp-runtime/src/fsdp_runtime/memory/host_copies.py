"""Copies between a device and host memory: on an accelerator from and to pinned memory, on a separate stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime.errors import OffloadError

#: New host memory is compared with the available memory in steps of this many bytes.
_CHECKED_BYTES = 2**28


@dataclass
class HeldBytes:
    """Bytes of activations in host memory: now, and the most since the start of a measurement."""

    now: int = 0
    peak: int = 0
    checked: float = 0

    def add(self, nbytes: int) -> None:
        """Count new bytes; raise :class:`OffloadError` before the host's memory is used up."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        if self.now > self.checked:
            purpose = f"the activations after the first {self.now:,} bytes"
            fix = 'recompute blocks with ActivationCheckpointing("block", offload=True), or give smaller micro-batches'
            require_host_memory(_CHECKED_BYTES, purpose, fix)
            self.checked = self.now + _CHECKED_BYTES // 2


#: The activations of this process.
HELD_BYTES = HeldBytes()


class HostCopies:
    """Copies between an accelerator and pinned memory, on one stream beside the stream of the computation.

    Without a device, copies within host memory, for a model on the CPU: each copy is complete at its call.
    """

    # Tensors of the device belong to the stream of the computation: it makes them, and it waits for a copy before it
    # uses or frees them. So the caching allocator may reuse their memory in the order of that stream.

    held = HELD_BYTES
    _stream: torch.Stream | None = None

    def __init__(self, device: torch.device | None = None, *, waits: bool = True) -> None:
        self._device, self._waits = device, waits  # each copy waits for the current stream
        if device is not None:
            self._stream = torch.Stream(device)

    def empty(self, nbytes: int) -> Tensor:
        """Return host memory for copies, ``[bytes]`` uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy a tensor, after the work that the current stream has at the call."""
        if self._stream is None:
            target.copy_(source)
            return
        if self._waits:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            target.copy_(source, non_blocking=True)

    def to_host(self, source: Tensor) -> Any:
        """Begin to copy a tensor to new host memory."""
        if self._stream is None:
            return source.clone()
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self.copy(host, source)
        return host

    def to_device(self, host: Any) -> Tensor:
        """Begin to copy the result of :meth:`to_host` back to new memory of the device."""
        target = torch.empty(host.shape, dtype=host.dtype, device=self._device or host.device)
        self.copy(target, host)
        return target

    def record(self) -> Any:
        """Return an event behind the copies so far."""
        return None if self._stream is None else self._stream.record_event()

    def for_thread(self) -> HostCopies:
        """Return copies for another thread, behind the work that the current stream has now, but no later work."""
        # A ``torch.Stream`` keeps the stream before its ``with``, so that two threads must not share one.
        if self._stream is None:
            return self
        copies = HostCopies(self._device, waits=False)
        copies._stream.wait_stream(torch.accelerator.current_stream(self._device))  # type: ignore[union-attr]
        return copies

    def enter_thread(self) -> None:
        """Make the device current in the thread of the call."""
        if self._stream is not None:
            torch.accelerator.set_device_index(self._device)

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event; the host goes on."""
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def synchronize(self, event: Any) -> None:
        """Let the host wait for an event."""
        if event is not None:
            event.synchronize()


#: Makes the copies of a device; a dry run and tests put another function in its place.
make_copies: Callable[[torch.device], HostCopies] = cache(
    lambda device: HostCopies(None if device.type == "cpu" else device)
)


def require_host_memory(nbytes: int, purpose: str, fix: str) -> None:
    """Raise :class:`OffloadError` unless the host has ``nbytes`` of available memory."""
    available = available_host_memory()
    if available is not None and nbytes > available:
        raise OffloadError(f"{purpose} take {nbytes:,} bytes of host memory, and {available:,} are available: {fix}")


def available_host_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that new allocations may take on this host, within the limit of its cgroup; Linux only."""
    group, bounds = root / "sys/fs/cgroup", []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        bounds += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
        limit = int((group / "memory.max").read_text())  # "max" without a limit
        files = (group / "memory.stat").read_text().splitlines()
        reclaimed = sum(int(line.split()[1]) for line in files if line.startswith("inactive_file"))
        bounds += [max(0, limit - int((group / "memory.current").read_text()) + reclaimed)]
    except (OSError, ValueError):
        pass  # another system, or no limit
    return min(bounds, default=None)
