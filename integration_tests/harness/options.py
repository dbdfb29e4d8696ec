"""Options of ``parallelize`` as tests pass them around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_runtime.steps import ContextParallel

#: Each rank of ``cp`` holds one contiguous chunk.
CONTIGUOUS: Mapping[str, Any] = {"context_parallel": ContextParallel(load_balancer=None)}


def load_balancer_of(options: Mapping[str, Any]) -> Any:
    """The order of tokens that options ask for."""
    value = options.get("context_parallel")
    return value.load_balancer if isinstance(value, ContextParallel) else ContextParallel().load_balancer
