"""``torch.compile`` of each block, in place."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fsdp_runtime.model.structure import ModelStructure

logger = logging.getLogger(__name__)


def apply_compile(structure: ModelStructure, options: Mapping[str, Any] | None = None) -> list[str]:
    """Compile every block with ``nn.Module.compile``: names, classes and the state dict stay as they are.

    Blocks of one class share their compiled code.  Call it after layers are split and checkpointing is set, whose
    hooks and recomputation are then compiled too, and before FSDP2, whose hooks run outside (the order of
    torchtitan's ``parallelize_llama``).

    Args:
        structure: the model's parts.
        options: keywords of ``torch.compile``, as ``{"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}``.

    Returns:
        The paths of the blocks.
    """
    for block in structure.blocks.values():
        block.compile(**dict(options or {}))
    logger.info("torch.compile: %d blocks", len(structure.blocks))
    return list(structure.blocks)
