"""Which architectures there are, and how each is built tiny."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from harness.models import jitter
from zoo.extras import EXTRAS
from zoo.shrink import tiny_fields


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Args:
        name: the row's name; the model type for what transformers maps to a causal language model.
        model_type: the config's ``model_type``.
        class_name: the model class.
        changes: config fields on top of the generic rule and the model type's own.
    """

    name: str
    model_type: str
    class_name: str
    changes: Mapping[str, Any] = field(default_factory=dict)


#: Architectures that must work besides those that transformers maps to a causal language model with a plan.
OTHERS = (
    Entry("qwen3-classifier", "qwen3", "Qwen3ForSequenceClassification", {"num_labels": 3}),
)


@cache
def entries() -> dict[str, Entry]:
    """Every row by its name."""
    return {entry.name: entry for entry in (*planned_causal_models(), *OTHERS)}


def planned_causal_models() -> list[Entry]:
    """What the installed transformers maps to a causal language model and ships a tensor-parallel plan for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = []
    for model_type, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        class_name = classes if isinstance(classes, str) else classes[0]
        config = CONFIG_MAPPING[model_type]
        configs = [config, *(sub for sub in config.sub_configs.values() if isinstance(sub, type))]
        if any(getattr(each, "base_model_tp_plan", None) for each in configs):
            found.append(Entry(model_type, model_type, class_name))
    return found


def tiny_config(entry: Entry) -> Any:
    """The config of a row's tiny model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[entry.model_type]
    return config_class(**_fields(config_class, entry.model_type, entry.changes))


def tiny_model(entry: Entry, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """The tiny jittered model of a row in evaluation mode, the same on every rank."""
    import transformers

    torch.manual_seed(seed)
    config = tiny_config(entry)
    model_class = getattr(transformers, entry.class_name)
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()  # as AutoModelForCausalLM does
    options = {"experts_implementation": "eager"} if model_class._can_set_experts_implementation() else {}
    model: nn.Module = model_class._from_config(config, **options)
    model.eval()  # no dropout; gradients flow as in training
    model.to(dtype)
    _restore_single_precision(model)
    jitter(model)
    return model


def _fields(config_class: Any, model_type: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    default = config_class().to_dict()
    fields = tiny_fields(default) | EXTRAS.get(model_type, {})
    text = config_class.sub_configs.get("text_config")
    if isinstance(default.get("text_config"), dict) and isinstance(text, type):
        text_type = default["text_config"]["model_type"]
        fields["text_config"] = _fields(text, text_type, {}) | fields.get("text_config", {})
    return fields | dict(changes)


def _restore_single_precision(model: Any) -> None:
    """Some code keeps a part in float32 whatever the model is in, and casts its input to match."""
    names = [*(model._keep_in_fp32_modules_strict or ())]
    for path, parameter in model.named_parameters():
        if any(name in path for name in names):
            parameter.data = parameter.data.float()
