"""Describe a parallelized model, check its replicas and gradients, and let ranks share a device.

Results: ``ParallelismReport``
Backends: ``register_staged_backend``

The other calls are in ``fsdp_runtime``.
"""

from __future__ import annotations

from fsdp_runtime.debug.describe import ParallelismReport
from fsdp_runtime.debug.staged_backend import register_staged_backend

__all__ = ["ParallelismReport", "register_staged_backend"]
