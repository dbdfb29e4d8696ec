"""Process groups of transfers: between ranks of separate jobs, and formed again after a rank has died."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from fsdp_runtime._torch_compat import separate_group
from fsdp_runtime.errors import OptionError, WeightSyncError
from fsdp_runtime.sharded.collectives import own_rank

#: How long an exchange of a transfer may take before its ranks give up.
DEFAULT_TIMEOUT = timedelta(minutes=5)


def transfer_group(
    store: Store,
    rank: int,
    world_size: int,
    *,
    name: str = "transfer",
    backend: str = "gloo",
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> ProcessGroup:
    """Form a process group of ranks that belong to separate jobs, such as a trainer's and an engine's.

    It is no part of a job's world: processes have ranks of their own in it, need no ``init_process_group``, and keep
    the groups that they have.  After a rank has died, the others form a new one under another name with its
    replacement, and the trainer goes on.  Leave it with ``torch.distributed.destroy_process_group(group)``.

    Args:
        store: where the ranks find each other, such as a ``torch.distributed.TCPStore`` that the trainer's first rank
            opens.
        rank: this process's rank in the group, as in the plan.
        world_size: processes of the group.
        name: the same on every rank, and another for each group of a store.
        backend: ``"gloo"``, ``"nccl"`` or another of torch's.
        timeout: how long to wait for the others, and torch's timeout of the group's operations.

    Returns:
        The group; pass it to :func:`execute_transfer`, :class:`WeightSync` or :func:`verify_transfer`.

    Raises:
        OptionError: the rank is not one of ``world_size``, torch has no such backend, or the name is in use.
        WeightSyncError: not all ranks came in time.

    Example:
        >>> import torch.distributed as dist
        >>> from fsdp_runtime.sync import transfer_group
        >>> group = transfer_group(dist.HashStore(), 0, 1)
        >>> group.rank(), group.size()
        (0, 1)
        >>> dist.destroy_process_group(group)
    """
    if not 0 <= rank < world_size:
        raise OptionError(f"rank={rank}, world_size={world_size}: give a rank from 0 to world_size - 1")
    unknown = {part.rpartition(":")[2] for part in backend.lower().split(",")} - set(dist.Backend.backend_list)
    if unknown:
        raise OptionError(f"backend={backend!r}: give one of {', '.join(dist.Backend.backend_list)}")
    start = time.monotonic()
    try:
        return separate_group(store, rank, world_size, name, backend, timeout)
    except ValueError as error:
        raise OptionError(f"name={name!r}: this process has a group of that name; give each group another") from error
    except RuntimeError as error:
        raise WeightSyncError(
            f"rank {rank} of {world_size} could not join the group {name!r}, after {time.monotonic() - start:.1f} of "
            f"{timeout.total_seconds():g} s: start every rank, with the same store and name "
            f"({str(error).partition(chr(10))[0]})"
        ) from error


def rank_in(group: ProcessGroup | None) -> int:
    """Return this process's rank in a group; for ``None`` in the world, or 0 where there is none."""
    # ``torch.distributed.get_rank`` takes ranks of a group for ranks of the world, which a separate group has not.
    return own_rank() if group is None else group.rank()
