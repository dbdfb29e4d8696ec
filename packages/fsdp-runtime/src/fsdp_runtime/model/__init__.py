"""A model's structure, state, buffers and materialisation.

Calls:   ``inspect_model``
Results: ``ModelStructure``, ``AttentionHeads``
"""

from __future__ import annotations

from fsdp_runtime.model.generators import rng_states as rng_states
from fsdp_runtime.model.generators import set_rng_states as set_rng_states
from fsdp_runtime.model.inference_mode import without_inference_mode as without_inference_mode
from fsdp_runtime.model.stages import whole_entries as whole_entries
from fsdp_runtime.model.state import state_entries as state_entries
from fsdp_runtime.model.structure import AttentionHeads, ModelStructure, inspect_model

__all__ = ["AttentionHeads", "ModelStructure", "inspect_model"]
