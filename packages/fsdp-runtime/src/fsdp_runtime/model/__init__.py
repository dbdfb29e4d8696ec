"""A model's structure, state, buffers and materialisation.

Calls:   ``inspect_model``
Results: ``ModelStructure``, ``AttentionHeads``
"""

from __future__ import annotations

from fsdp_runtime.model.generators import Generators as Generators
from fsdp_runtime.model.inference_mode import without_inference_mode as without_inference_mode
from fsdp_runtime.model.state import state_entries as state_entries
from fsdp_runtime.model.structure import AttentionHeads, ModelStructure, inspect_model

__all__ = ["AttentionHeads", "ModelStructure", "inspect_model"]
