"""Watching over the ranks of a job: who died, stalled or failed, in which phase, told to all within a bound.

A rank that waits for another inside a collective learns of its end as "Connection closed by peer", or, where the
other only stopped, after the backend's time-out of minutes; neither names a rank.  Here every rank posts signs of life
to the store that the ranks met at, beside whatever its main thread does.
"""

from __future__ import annotations

from fsdp_runtime.monitor.monitor import Watch, watch_ranks

__all__ = ["Watch", "watch_ranks"]
