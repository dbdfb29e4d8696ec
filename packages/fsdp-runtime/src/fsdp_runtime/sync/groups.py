"""Process groups of transfers between ranks of separate jobs; a new group replaces a group with a dead rank."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from fsdp_runtime._torch_compat import separate_group
from fsdp_runtime.errors import OptionError, WeightSyncError
from fsdp_runtime.sharded import own_rank

#: Maximum time of an exchange in a transfer.
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

    The group is separate from a job's world: it numbers its own ranks, needs no ``init_process_group``, and leaves
    other groups unchanged.  After a rank has died, the other ranks form a new group under another name with the
    replacement, and the trainer goes on.  Leave it with ``torch.distributed.destroy_process_group(group)``.
    :func:`execute_transfer`, :class:`WeightSync` and :func:`verify_transfer` take it.

    Args:
        store: the meeting point of the ranks, such as a ``torch.distributed.TCPStore`` that the trainer's first rank
            opens.
        rank: this process's rank in the group, as in the plan.
        world_size: processes of the group.
        name: the same on every rank, and unique among the groups of a store.
        backend: ``"gloo"``, ``"nccl"`` or another backend of torch.
        timeout: maximum wait for the other ranks, and torch's timeout of the group's operations.

    Raises:
        OptionError: the rank is not below ``world_size``, torch has no such backend, or the name is in use.
        WeightSyncError: not all ranks joined in time.

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
    """Return this process's rank in a group; for ``None``, the rank in the world, or 0 without a world."""
    # ``torch.distributed.get_rank`` maps a group's ranks to ranks of the world, and a separate group has no such ranks.
    return own_rank() if group is None else group.rank()
