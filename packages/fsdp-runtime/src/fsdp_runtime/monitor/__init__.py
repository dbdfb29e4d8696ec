"""Monitor the ranks of a job by heartbeats: name the rank that died, stalled or failed, and its phase, on all others.

A rank that waits in a collective learns of another rank's end as "Connection closed by peer", or only after the
backend's timeout of minutes; neither names the rank.  Here every rank writes heartbeats to the rendezvous store from a
thread of its own.
"""

from __future__ import annotations

from fsdp_runtime.monitor.monitor import RankMonitor, monitor_ranks

__all__ = ["RankMonitor", "monitor_ranks"]
