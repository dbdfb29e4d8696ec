"""Refuse a model in pipeline stages, which has only a part of the blocks on each rank."""

from __future__ import annotations

from torch import nn

from fsdp_runtime.errors import ModelError
from fsdp_runtime.runtime_state import RUNTIME_STATE


def require_whole(model: nn.Module, call: str) -> None:
    """Check that a model is not in pipeline stages, for a function that needs every block on every rank."""
    for module in model.modules():
        state = module.__dict__.get(RUNTIME_STATE)
        if state is not None and state.stages is not None:
            raise ModelError(
                f"{call} does not support a model in pipeline stages (pp={state.stages.mesh.size()}): its ranks have "
                "different blocks; use a mesh without pp"
            )
