"""Memory of a sharded model: gradient accumulation, full parameters for a while, and shards that leave the device.

Results: ``OffloadReport``

The calls are in ``fsdp_runtime``.
"""

from __future__ import annotations

from fsdp_runtime.memory.offload import OffloadReport

__all__ = ["OffloadReport"]
