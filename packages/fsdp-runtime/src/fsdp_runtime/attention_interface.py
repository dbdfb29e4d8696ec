"""Replacing a transformers model's attention through its public interfaces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


def use_attention(model: Any, name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Let the text part of a model compute attention and its masks by functions of ours.

    The model gets a config of its own first: another one built from the same config must keep its attention.

    Args:
        model: a ``PreTrainedModel``.
        name: what to register the functions as.
        attend: as ``AttentionInterface`` wants it.
        mask: as ``AttentionMaskInterface`` wants it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if id(config := getattr(module, "config", None)) in copies:
            module.config = copies[id(config)]
    text = model.config.get_text_config()
    key = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is text), None)
    model.set_attn_implementation(name if key is None else {key: name})


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary embeddings that a text config asks for: one for all layers, or one a kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(each.get("rope_type", "default")) for each in nested or [rope]}
