"""A backend of ``torch.distributed`` for tests: several ranks share one device, and gloo carries their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from fsdp_runtime._torch_compat import gloo_beneath

#: The name of the backend.
STAGED = "staged"
#: Calls of a process group that write to their first argument; torch 2.13 renamed some, and both names are called.
_WRITING = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "recv", "recv_anysource"),
    *("allgather", "allgather_coalesced", "gather", "scatter", "reduce_scatter", "alltoall"),
    *("_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall_base", "all_to_all_single"),
)
_READING = ("send", "barrier")


def register_staged_backend() -> str:
    """Register a backend that lets several ranks share one device, and return its name, ``"staged"``.

    NCCL refuses two ranks on one device, and gloo lacks some collectives of tensors on a device.  A group of this
    backend copies tensors to the host, calls gloo, and copies the results back when the work is waited for.  All
    results equal gloo's.  The copies make it slow: it is for tests of parallelism on one device.

    Ranks choose their device first (``torch.accelerator.set_device_index``).  Groups and meshes of the world have the
    same backend.  A second call changes nothing.

    Example:
        >>> import torch.distributed as dist
        >>> from fsdp_runtime.debug import register_staged_backend
        >>> dist.init_process_group(register_staged_backend(), store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.get_backend()
        'staged'
        >>> dist.destroy_process_group()
    """
    if STAGED not in dist.Backend.backend_list:
        accelerator = torch.accelerator.current_accelerator()
        devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        dist.Backend.register_backend(STAGED, _StagedGroup, devices=devices)
    return STAGED


class _StagedGroup(ProcessGroup):
    """A process group that calls gloo with copies on the host."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub has one of two signatures
        self.gloo = gloo_beneath(self, store, timeout, dist.Backend.backend_capability[STAGED])

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the backend's name."""
        return STAGED


class _StagedWork(dist.Work):
    """A call of gloo on host tensors; the first wait copies its results to the device."""

    def __init__(self, work: dist.Work, outputs: Any, staged: Any) -> None:
        super().__init__()
        self._work, self._outputs = work, outputs
        self._copies = list(zip(_tensors(outputs), _tensors(staged), strict=True))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until gloo is done, and copy; zero waits as long as the group's timeout allows."""
        self._work.wait(timeout)
        with torch.no_grad():
            while self._copies:
                output, host = self._copies.pop()
                output.detach().copy_(host)
        return True

    def is_completed(self) -> bool:
        """Return whether gloo is done; the results are on the device then, and an error is raised."""
        return self._work.is_completed() and self.wait()

    def result(self) -> Any:
        """Return the tensors that the call wrote to."""
        self.wait()
        return list(_tensors(self._outputs))

    def source_rank(self) -> int:
        """Return the sender of a message from any rank."""
        return self._work.source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future of the tensors that the call wrote to."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument: a tensor, or nested lists of tensors."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _staged(value: Any) -> Any:
    """Return an argument with copies of its tensors on the host; other values are returned as they are."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value.detach())
    return [_staged(part) for part in value] if isinstance(value, list | tuple) else value


def _call(name: str, writes: bool) -> Callable[..., dist.Work]:
    def method(group: _StagedGroup, *args: Any, **options: Any) -> dist.Work:
        staged = [_staged(argument) for argument in args]
        work = getattr(group.gloo, name)(*staged, **options)
        return _StagedWork(work, args[0], staged[0]) if writes else _StagedWork(work, (), ())

    return method


for _name in _WRITING + _READING:
    setattr(_StagedGroup, _name, _call(_name, _name in _WRITING))
