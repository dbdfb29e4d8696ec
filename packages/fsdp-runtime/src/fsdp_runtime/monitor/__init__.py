"""Monitor ranks by heartbeats: all other ranks name the rank that died, stalled or failed, and its phase.

Lost ranks:  ``monitor_ranks``, which yields a ``RankMonitor``
Stop:        ``stop_on_signal``
Errors:      ``LostRankError``
"""

from __future__ import annotations

from fsdp_runtime.errors import LostRankError
from fsdp_runtime.monitor.distributed import RankMonitor, monitor_ranks
from fsdp_runtime.monitor.signals import stop_on_signal

__all__ = ["LostRankError", "RankMonitor", "monitor_ranks", "stop_on_signal"]
