"""Asynchronous saves: copies of tensors in host memory, and threads that write them, at most one save at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_runtime._torch_compat import local_group
from fsdp_runtime.sharded.collectives import ModelRanks

T = TypeVar("T")
#: Bytes of a piece of host memory; pinned memory comes in powers of two.
_SLAB = 2**26


class HostStaging:
    """Bytes of tensors, copied to host memory; the memory is pinned for tensors on an accelerator."""

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    def copy(self, tensor: Tensor) -> list[Tensor]:
        """Start to copy a tensor; return its bytes in pieces of uint8, complete after :meth:`synchronize`."""
        flat, pieces = flat_bytes(tensor.detach()), []
        while flat.numel():
            piece = self._take(flat.numel(), flat.device.type)
            piece.copy_(flat[: len(piece)], non_blocking=True)
            pieces.append(piece)
            flat = flat[len(piece) :]
        return pieces

    def synchronize(self) -> None:
        """Return once every copy is complete; drop the unused memory."""
        if any(kind != "cpu" for kind in self._room):
            torch.accelerator.synchronize()
        self._room.clear()

    def _take(self, nbytes: int, kind: str) -> Tensor:
        """Return unused host memory: at most ``nbytes``, at least one byte."""
        room = self._room.get(kind)
        if room is None or not len(room):
            room = torch.empty(_SLAB, dtype=torch.uint8, pin_memory=kind != "cpu")
        self._room[kind] = room[nbytes:]
        return room[:nbytes]


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, ``[bytes]`` uint8."""
    flat = tensor.contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def drained(items: list[T]) -> Iterator[T]:
    """Yield the items of a list in order, and empty the list."""
    items.reverse()
    while items:
        yield items.pop()


#: Longest wait for the other ranks' writes; the exit of another rank's process is noticed at once.
_TIMEOUT = timedelta(hours=1)

logger = logging.getLogger(__name__)
_running: list[SaveFuture[object]] = []
_groups: dict[tuple[int, ...], tuple[ProcessGroup | None, ProcessGroup]] = {}


class SaveFuture(Generic[T]):
    """A save that a thread completes; the interpreter's exit waits for it.

    The new files take effect once all ranks have written, whether or not :meth:`wait` is called.  An error of one rank
    is an error on all ranks, and the old files stay in effect; the error is logged at once, and :meth:`wait` raises it.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._future = ThreadPoolExecutor(1, "save").submit(finish)

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return self._future.done()

    def wait(self) -> T:
        """Return the save's result once it has ended, or raise its error.  Not collective."""
        return self._future.result()


def save_in_thread(
    finish: Callable[[ModelRanks], T], ranks: ModelRanks, everyone: Sequence[int], resources: ExitStack
) -> SaveFuture[T]:
    """Complete a save in a thread, which then closes ``resources``.  Collective."""
    # ``finish`` gets the ranks with a separate process group: its collectives do not mix with training's collectives.
    separate = ranks
    if ranks.groups:
        world, group = _groups.get(tuple(everyone), (None, None))
        if group is None or world is not dist.group.WORLD:
            group = local_group(list(everyone), ranks.groups, timeout=_TIMEOUT, backend="gloo")
            _groups[tuple(everyone)] = dist.group.WORLD, group
        separate = replace(ranks, groups=(group,))
    moved = resources.pop_all()

    def run() -> T:
        try:
            with moved:
                return finish(separate)
        except Exception:
            logger.exception("an asynchronous save failed; earlier saves are unchanged")
            raise

    future = SaveFuture(run)
    _running[:] = [save for save in _running if not save.done()]
    _running.append(future)  # type: ignore[arg-type]  # read only
    return future


def wait_for_running() -> None:
    """Return once this process's unfinished saves have ended."""
    wait([save._future for save in _running])
