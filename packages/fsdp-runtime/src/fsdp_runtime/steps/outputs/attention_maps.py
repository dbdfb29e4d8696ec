"""Attention maps (``output_attentions=True``) of a sharded model are refused: a rank computes a part of each map."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from fsdp_runtime._transformers_compat.models import asks_for, is_transformers_model
from fsdp_runtime.errors import LayoutError
from fsdp_runtime.wrap import hook_forward


def refuse_attention_maps(model: nn.Module, axis: str) -> None:
    """Let every transformers model in a model refuse a forward that asks for attention maps."""
    for module in filter(is_transformers_model, model.modules()):
        hook_forward(module, "refuses attention maps", before=partial(_refuse, axis))


def _refuse(axis: str, module: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
    if asks_for(module, kwargs, "attentions"):
        raise LayoutError(
            f"output_attentions=True: a rank of {axis} computes a part of each attention map: leave it out, or use a "
            f"mesh without {axis}"
        )
