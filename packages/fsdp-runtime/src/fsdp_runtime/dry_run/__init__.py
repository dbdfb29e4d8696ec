"""Dry run: memory, traffic and work of a training step on each rank of a mesh, without a device or weights.

Calls:   ``estimate`` (one mesh), ``sweep`` (all meshes of a number of ranks, ranked)
Results: ``Estimate``, with ``Settings``, ``Memory``, ``MemoryBreakdown``, ``Peak``, ``Traffic``,
         ``ReplicatedParameters``, ``Assumption``, ``Advice`` and ``PHASES``; ``Sweep``, with ``Candidate``
Errors:  ``EstimateError``

``trace/`` records one step, ``scale/`` extends it to all repeated blocks, ``report/`` shows results and imports only
result types.  Importing this package does not import torch: ``estimate`` does, after it has read its arguments.
"""

from __future__ import annotations

from fsdp_runtime.dry_run.api import estimate
from fsdp_runtime.dry_run.compare import sweep
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
from fsdp_runtime.errors import EstimateError

__all__ = [
    "PHASES",
    "Advice",
    "Assumption",
    "Candidate",
    "Estimate",
    "EstimateError",
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
