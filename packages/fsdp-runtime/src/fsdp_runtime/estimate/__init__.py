"""The dry run: what a training step holds and sends on each rank of a mesh, without a device or weights.

``estimate``             runs the step on fake tensors and returns an ``Estimate``
``result``               what is returned: ``Estimate``, ``Settings``, ``Memory``, ``Peak``, ``Bytes``, ``Traffic``, …
"""

from __future__ import annotations

from fsdp_runtime.estimate.public import estimate
from fsdp_runtime.estimate.result import (
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
    "Estimate",
    "Memory",
    "Peak",
    "Settings",
    "Traffic",
    "Whole",
    "estimate",
]
