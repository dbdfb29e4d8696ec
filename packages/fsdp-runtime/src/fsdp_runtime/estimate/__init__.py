"""The dry run: what a training step holds and sends on each rank of a mesh, without a device or weights.

``estimate``             runs the step on fake tensors and returns an ``Estimate``
``sweep``                estimates many meshes of the same ranks and ranks them, as a ``Sweep``
``result``               what is returned: ``Estimate``, ``Settings``, ``Memory``, ``Peak``, ``Bytes``, ``Traffic``, …
"""

from __future__ import annotations

from fsdp_runtime.estimate.api import estimate
from fsdp_runtime.estimate.candidates import Candidate, Sweep
from fsdp_runtime.estimate.sweep import sweep
from fsdp_runtime.estimate.types import (
    PHASES,
    Advice,
    Assumed,
    Bytes,
    Estimate,
    Memory,
    Peak,
    Settings,
    Traffic,
    Whole,
)

__all__ = [
    "PHASES",
    "Advice",
    "Assumed",
    "Bytes",
    "Candidate",
    "Estimate",
    "Memory",
    "Peak",
    "Settings",
    "Sweep",
    "Traffic",
    "Whole",
    "estimate",
    "sweep",
]
