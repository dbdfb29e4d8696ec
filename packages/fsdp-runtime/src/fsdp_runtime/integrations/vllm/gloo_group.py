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


class GlooGroup:
    """A group that one process opens and the others join; rank 0 is the one that opens it.

    Args:
        store: the store through which the ranks find each other.
        rank: this process's rank.
        world_size: processes of the group.
        timeout_s: seconds after which an operation that a rank misses fails.
    """

    def __init__(self, store: dist.TCPStore, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast a tensor from rank 0, and wait for it.

        Raises:
            RuntimeError: a rank left the group, or the time is over.
        """
        self._group.broadcast(tensor, 0).wait()

    def close(self) -> None:
        """Close the connections; operations in which other ranks wait for this one fail at once."""
        self._group = None  # gloo closes them when the group is freed; its abort() does not


def open_store(host: str, world_size: int, timeout_s: float) -> dist.TCPStore:
    """Open the store of a new group on a free port of this machine."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)


def open_group(store: dist.TCPStore, world_size: int, timeout_s: float, failed: Callable[[], bool]) -> GlooGroup | None:
    """Form the group as rank 0, once all others are there.

    Args:
        store: from :func:`open_store`.
        world_size: processes of the group.
        timeout_s: seconds to wait for the others, and the group's timeout.
        failed: whether there is no use in waiting on.

    Returns:
        The group, or ``None`` if it failed before.

    Raises:
        WeightSyncError: ranks are missing; the message names them.
    """
    end = time.monotonic() + timeout_s
    keys = {rank: _key(rank) for rank in range(1, world_size)}
    while not store.check(list(keys.values())):
        if failed():
            return None
        if time.monotonic() > end:
            missing = [rank - 1 for rank, key in keys.items() if not store.check([key])]
            raise WeightSyncError(f"workers {missing} of the engine did not join within {timeout_s:g} s")
        time.sleep(0.01)
    return GlooGroup(store, 0, world_size, timeout_s)


def join_group(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> GlooGroup:
    """Join a group as one of the ranks after 0."""
    timeout = timedelta(seconds=math.ceil(timeout_s))
    store = dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    store.set(_key(rank), "")
    return GlooGroup(store, rank, world_size, timeout_s)


def _key(rank: int) -> str:
    return f"joined/{rank}"
