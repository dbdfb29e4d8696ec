"""Dry run: memory, traffic and work of a training step on each rank of a mesh, without a device or weights.

``estimate``             traces the step on fake tensors and returns an ``Estimate``
``sweep``                estimates many meshes with the same number of ranks and ranks them, as a ``Sweep``
``types``                the results: ``Estimate``, ``Settings``, ``Memory``, ``Peak``, ``Traffic``, …

``trace/`` records one step, ``scale/`` extends it to all repeated blocks, ``report/`` shows results and imports only
result types.
"""

from __future__ import annotations

from fsdp_runtime.dry_run.api import estimate
from fsdp_runtime.dry_run.sweep import sweep
from fsdp_runtime.dry_run.sweep_types import Candidate, Sweep
from fsdp_runtime.dry_run.types import (
    PHASES,
    Advice,
    Assumption,
    Estimate,
    Memory,
    MemoryBreakdown,
    Peak,
    ReplicatedParameters,
    Settings,
    Traffic,
)

__all__ = [
    "PHASES",
    "Advice",
    "Assumption",
    "Candidate",
    "Estimate",
    "Memory",
    "MemoryBreakdown",
    "Peak",
    "ReplicatedParameters",
    "Settings",
    "Sweep",
    "Traffic",
    "estimate",
    "sweep",
]
