"""Options of ``parallelize`` as tests pass them around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from fsdp_runtime.keywords import Options, steps_of
from fsdp_runtime.steps import ContextParallel

#: Each rank of ``cp`` holds one contiguous chunk.
CONTIGUOUS: Mapping[str, Any] = {"context_parallel": ContextParallel(load_balancer=None)}


def load_balancer_of(options: Mapping[str, Any]) -> Any:
    """The order of tokens that options ask for."""
    known = {name: value for name, value in options.items() if name in get_type_hints(Options)}
    return next(step.load_balancer for step in steps_of(**known) if isinstance(step, ContextParallel))
