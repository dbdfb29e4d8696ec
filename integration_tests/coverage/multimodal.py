"""Tiny vision-language and audio-language models of every class that transformers maps to such a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from coverage.measure import default_dtype
from coverage.multimodal_sizes import CHANGES, TOWER
from coverage.shrink import HEADS, HIDDEN, VOCAB
from coverage.table import memory_filled, prepare, text_fields
from harness.models import copy_of_one_build

#: Ids of the tokens that stand for media, from the end of the vocabulary downwards.
_PLACEHOLDERS = ("image", "video", "audio", "media", "vision")
#: The two models of an encoder-decoder.
_PARTS = ("encoder", "decoder")
#: Model types whose code makes tensors without a dtype, which have to be of its weights' one.
DEFAULT_FLOAT64 = ("kosmos-2", "kosmos-2.5")
#: Sections of a rotary embedding with three positions: time, height, width.
_SECTIONS = ("time", "height", "width")


@cache
def multimodal_classes() -> dict[str, str]:
    """Return every class of ``AutoModelForImageTextToText`` and ``AutoModelForMultimodalLM``, by model type."""
    from transformers.models.auto import modeling_auto

    images = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return images | dict(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)


def multimodal_model(
    model_type: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, blocks: int | None = None
) -> nn.Module:
    """Return the tiny jittered model of a model type, without dropout, the same on every rank."""
    key = ("multimodal", model_type, dtype, seed, blocks)
    return copy_of_one_build(lambda: _built(model_type, dtype, seed, blocks), key)


def _built(model_type: str, dtype: torch.dtype, seed: int, blocks: int | None) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    model_class: Any = getattr(transformers, multimodal_classes()[model_type])
    config = multimodal_config(model_type)
    config.get_text_config()._experts_implementation = "eager"
    if blocks is not None:
        config.get_text_config().num_hidden_layers = blocks
    options = {"experts_implementation": "eager"} if model_class._can_set_experts_implementation() else {}
    default = torch.float64 if model_type in DEFAULT_FLOAT64 else torch.float32
    with memory_filled(), default_dtype(default):
        model: nn.Module = model_class._from_config(config, attn_implementation="eager", **options).eval()
    prepare(model, dtype)
    return model


def multimodal_config(model_type: str) -> Any:
    """Return the config of a tiny model: the text model's sizes and one small size for every tower."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    default = config_class().to_dict()
    changes = CHANGES.get(model_type, {})
    fields = text_fields(model_type, {})
    for name, value in default.items():
        if name in _PARTS and isinstance(value, dict) and value.get("model_type"):
            fields[name] = _part(value) | changes.get(name, {})
        elif name.endswith("_config") and name != "text_config" and isinstance(value, dict):
            fields[name] = _tower(value, {**fields.get(name, {}), **changes.get(name, {})})
        elif name in TOWER and name not in fields and value is not None:
            fields[name] = TOWER[name]
    fields |= {name: value for name, value in changes.items() if not (_is_config(name) and default.get(name))}
    if isinstance(fields.get("text_config"), dict):
        fields["text_config"] |= changes.get("text_config", {})
        _shrink_rotary(fields["text_config"], default["text_config"])
    else:
        _shrink_rotary(fields, default)
    return config_class(**fields, **_tokens({**default, **fields}, fields))


def _is_config(name: str) -> bool:
    return name in _PARTS or name.endswith("_config")


def _part(default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the tiny encoder or decoder of a model that has both."""
    model_type = default["model_type"]
    fields = {**text_fields(model_type, {}), "model_type": model_type}
    if isinstance(tower := default.get("vision_config"), dict):
        fields["vision_config"] = _tower(tower, {})
    if "image_size" in default:
        fields |= _tower(default, {})
    return fields


def _tower(default: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a tiny tower's config; towers inside it too."""
    fields: dict[str, Any] = {"model_type": default["model_type"]} if default.get("model_type") else {}
    for name, value in default.items():
        if name.endswith("_config") and isinstance(value, dict):
            fields[name] = _tower(value, changes.get(name, {}))
        elif name in TOWER and value is not None:
            size = TOWER[name]
            fields[name] = [size] * len(value) if isinstance(value, (list, tuple)) and isinstance(size, int) else size
    return fields | {name: value for name, value in changes.items() if not name.endswith("_config")}


def _shrink_rotary(fields: dict[str, Any], default: Mapping[str, Any]) -> None:
    """Scale the sections of a rotary embedding with three positions to the tiny head."""
    rotary = default.get("rope_parameters")
    if "rope_parameters" in fields or not isinstance(rotary, dict):
        return
    partial = rotary.get("partial_rotary_factor", default.get("partial_rotary_factor") or 1.0)
    pairs = int(fields.get("head_dim", HIDDEN // HEADS) * partial) // 2
    count = len(rotary.get("mrope_section", _SECTIONS))
    sections = [pairs // count] * (count - 1)
    fields["rope_parameters"] = {**rotary, "mrope_section": [*sections, pairs - sum(sections)]}


def _tokens(default: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, int]:
    """Return ids within the tiny vocabulary for the tokens that stand for media."""
    names = [
        name
        for name, value in default.items()
        if isinstance(value, int) and not isinstance(value, bool) and name not in fields and _is_placeholder(name)
    ]
    return {name: VOCAB - 1 - index for index, name in enumerate(names)}


def _is_placeholder(name: str) -> bool:
    return name.endswith(("token_id", "token_index", "_id")) and any(word in name for word in _PLACEHOLDERS)


__all__ = ["HIDDEN", "multimodal_classes", "multimodal_config", "multimodal_model"]
