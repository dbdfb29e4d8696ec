"""``monitor_ranks``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fsdp_runtime.errors import OptionError
from fsdp_runtime.monitor.distributed import DistributedMonitor
from fsdp_runtime.monitor.rank_monitor import RankMonitor


@contextmanager
def monitor_ranks(*, timeout: float = 60.0) -> Iterator[RankMonitor]:
    """End this rank within a bounded time if another rank is lost, and name that rank and its phase.

    A rank is lost if its process is killed, stopped or disconnected for ``timeout`` seconds, or if it raises inside the
    block.  Every other rank then ends within twice ``timeout``: with :class:`LostRankError` if its collective fails, as
    gloo's do when a peer dies.  A thread that is blocked in a collective cannot be interrupted, so otherwise the
    process logs the same message and exits with status 75.  An exception of this rank is reported to the others and
    passes through, with a note that names rank and phase.

    A ``RuntimeError`` may be the consequence of another rank's failure, so it is delayed until all other ranks have
    sent heartbeats for ``timeout``.  Collective over the world; rank 0 leaves last.  A single process is not monitored.

    Heartbeats use the store of ``init_process_group``: one small message per rank and round, and one per phase.  Rank 0
    reads all of them and announces a lost rank; the other ranks follow rank 0.

    Args:
        timeout: seconds.  A thread sends ten heartbeats in this time, whatever the main thread waits for; only code
            that holds Python's global interpreter lock for that long would be taken for dead.

    Yields:
        The monitor, for its :meth:`RankMonitor.phase`.

    Raises:
        LostRankError: another rank is lost.
        OptionError: the timeout is not positive.

    Example:
        >>> from fsdp_runtime.monitor import monitor_ranks
        >>> with monitor_ranks(timeout=60) as monitor:
        ...     with monitor.phase("forward"):
        ...         pass
    """
    if not timeout > 0:
        raise OptionError(f"timeout={timeout}: give seconds above 0")
    alone = not dist.is_initialized() or dist.get_world_size() < 2
    monitor = RankMonitor() if alone else DistributedMonitor(timeout)
    monitor.start()
    try:
        yield monitor
        monitor.finish()
    except BaseException as error:
        monitor.fail(error)
        raise
    finally:
        monitor.stop()
