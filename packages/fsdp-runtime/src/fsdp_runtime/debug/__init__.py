"""Describe a parallelized model, and check its replicas and gradients.

Results: ``ParallelismReport``

The calls are in ``fsdp_runtime``.
"""

from __future__ import annotations

from fsdp_runtime.debug.describe import ParallelismReport

__all__ = ["ParallelismReport"]
