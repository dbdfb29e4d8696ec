"""A model's structure, state, buffers and materialisation.

Calls:   ``inspect_model``
Results: ``ModelStructure``, ``AttentionHeads``
"""

from __future__ import annotations

from fsdp_runtime.model.structure import AttentionHeads, ModelStructure, inspect_model

__all__ = ["AttentionHeads", "ModelStructure", "inspect_model"]
