"""What a parallelized model is, and checks of its replicas and gradients.

Results: ``ParallelismReport``

The calls are in ``fsdp_runtime``.
"""

from __future__ import annotations

from fsdp_runtime.debug.describe import ParallelismReport

__all__ = ["ParallelismReport"]
