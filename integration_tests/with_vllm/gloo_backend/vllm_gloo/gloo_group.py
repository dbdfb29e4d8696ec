"""A gloo process group of one trainer rank and an engine's workers, apart from any other group of either side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsdp_runtime.errors import WeightSyncError

#: torch documents it and does not export it for type checkers.
_tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]


class GlooGroup:
    """A group that one process opens and the others join; rank 0 is the one that opens it.

    Args:
        store: the store through which the ranks find each other.
        rank: this process's rank.
        world_size: processes of the group.
        timeout_s: seconds after which an operation that a rank misses fails.
        name: what tells it from other groups.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float, name: str) -> None:
        self._store, self.name = store, name
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast a tensor from rank 0, and wait for it.

        Raises:
            RuntimeError: a rank left the group, or the time is over.
        """
        self._group.broadcast(tensor, 0).wait()

    def report(self, number: int, problem: str) -> None:
        """Tell rank 0 what became of a part of an update; an empty text where all is well."""
        self._store.set(_report_key(number, self.rank), problem)

    def reports(self, number: int) -> dict[int, str | None]:
        """Return, on rank 0, what each other rank reported, and ``None`` for those that have not."""
        keys = {rank: _report_key(number, rank) for rank in range(1, self.world_size)}
        return {rank: self._store.get(key).decode() if self._store.check([key]) else None for rank, key in keys.items()}

    def close(self) -> None:
        """Close the connections; operations in which other ranks wait for this one fail at once."""
        self._group = None  # gloo closes them when the group is freed; its abort() does not


def open_store(host: str, world_size: int, timeout_s: float) -> Any:
    """Open the store of a new group on a free port of this machine."""
    timeout = timedelta(seconds=timeout_s)
    return _tcp_store(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)


def open_group(
    store: Any, world_size: int, timeout_s: float, name: str, failed: Callable[[], bool]
) -> GlooGroup | None:
    """Form the group as rank 0, once all others are there.

    Args:
        store: from :func:`open_store`.
        world_size: processes of the group.
        timeout_s: the group's timeout, and half of the seconds to wait for the others, which an operation in an
            earlier group may keep.
        name: what tells it from other groups.
        failed: whether there is no use in waiting on.

    Returns:
        The group, or ``None`` if it failed before.

    Raises:
        WeightSyncError: ranks are missing; the message names them.
    """
    end = time.monotonic() + 2 * timeout_s
    keys = {rank: _key(rank) for rank in range(1, world_size)}
    while not store.check(list(keys.values())):
        if failed():
            return None
        if time.monotonic() > end:
            missing = [rank - 1 for rank, key in keys.items() if not store.check([key])]
            raise WeightSyncError(f"workers {missing} of the engine did not join within {2 * timeout_s:g} s")
        time.sleep(0.01)
    return GlooGroup(store, 0, world_size, timeout_s, name)


def join_group(host: str, port: int, rank: int, world_size: int, timeout_s: float, name: str) -> GlooGroup:
    """Join a group as one of the ranks after 0."""
    timeout = timedelta(seconds=math.ceil(timeout_s))
    store = _tcp_store(host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    store.set(_key(rank), "")
    return GlooGroup(store, rank, world_size, timeout_s, name)


def _key(rank: int) -> str:
    return f"joined/{rank}"


def _report_key(number: int, rank: int) -> str:
    return f"report/{number}/{rank}"
