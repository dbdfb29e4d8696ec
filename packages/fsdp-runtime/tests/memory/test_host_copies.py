"""The copies of an accelerator call torch's streams in the right order; the host's free memory is found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_runtime.errors import OffloadError
from fsdp_runtime.memory import host_copies
from fsdp_runtime.memory.host_copies import HostCopies, available_host_memory, require_host_memory

LOG: list[str] = []


class _Stream:
    """Records the calls of a stream; torch's class has every one of them."""

    def __init__(self, device: Any = None) -> None:
        self.name = "computation" if device is None else "copies"

    def wait_stream(self, other: _Stream) -> None:
        LOG.append(f"{self.name} wait for {other.name}")

    def wait_event(self, event: Any) -> None:
        LOG.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Any:
        return SimpleNamespace(name="the event", synchronize=lambda: LOG.append("the host waits"))

    def __enter__(self) -> None:
        LOG.append("enter")

    def __exit__(self, *_: Any) -> None:
        LOG.append("leave")


def test_device_copies_wait_for_the_computation_and_the_computation_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    used = {name for name in vars(_Stream) if name in dir(torch.Stream)} - {"__init__", "__doc__", "__module__"}
    assert {"wait_stream", "wait_event", "record_event", "__enter__", "__exit__"} <= used
    assert {"synchronize"} <= {*dir(torch.Event)}
    computation, pinned = _Stream(), []
    empty = torch.empty

    def without_a_device(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "Stream", _Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device: computation)
    monkeypatch.setattr(torch, "empty", without_a_device)
    copies = HostCopies(torch.device("cpu"))
    source = torch.arange(6.0)
    host = copies.to_host(source)
    assert LOG == ["copies wait for computation", "enter", "leave"]
    LOG.clear()
    back = copies.to_device(host)
    event = copies.record()
    copies.wait(event)
    copies.synchronize(event)
    assert LOG == [
        "copies wait for computation",
        "enter",
        "leave",
        "computation waits for the event",
        "the host waits",
    ]
    LOG.clear()
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: LOG.append(f"thread on {device}"))
    for_thread = copies.for_thread()  # on a stream that waits once
    for_thread.enter_thread()
    for_thread.copy(host, source)
    assert LOG == ["copies wait for computation", "thread on cpu", "enter", "leave"]
    assert torch.equal(back, source)
    assert copies.empty(5).shape == (5,)
    assert pinned == [True, False, True]  # the device's memory belongs to the stream of the computation


def _host(root: Path, limit: str) -> Path:
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:      50 kB\n")
    (group / "memory.max").write_text(limit)
    (group / "memory.current").write_text("30000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 2000\n")
    return root


@pytest.mark.parametrize(("limit", "available"), [("max", 51_200), ("40000", 12_000), ("20000", 0), ("99999", 51_200)])
def test_available_host_memory_keeps_the_limit_of_the_group(tmp_path: Path, limit: str, available: int) -> None:
    assert available_host_memory(_host(tmp_path, limit)) == available


def test_available_host_memory_is_unknown_on_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_host_memory(tmp_path) is None
    monkeypatch.setattr(host_copies, "available_host_memory", lambda: None)
    require_host_memory(2**60, "states", "")
    monkeypatch.setattr(host_copies, "available_host_memory", lambda: 10)
    with pytest.raises(OffloadError, match=r"states take 11 bytes of host memory, and 10 are available: take less"):
        require_host_memory(11, "states", "take less")
