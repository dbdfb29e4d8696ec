"""Which architectures there are, and how each is built tiny."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from coverage.extras import EXTRAS, WIDE_EXTRAS
from coverage.shrink import more_layers, tiny_fields, wider
from coverage.unplanned import DEFAULT_FLOAT64, UNPLANNED
from fsdp_runtime._transformers_compat.dtypes import kept_in_float32
from harness.models import copy_of_one_build, jitter
from harness.remote_code_models import REMOTE_CODE_MODELS


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Args:
        name: the row's name; the model type for what transformers maps to a causal language model.
        model_type: the config's ``model_type``.
        class_name: the model class.
        changes: config fields on top of the generic rule and the model type's own.
        options: further keywords for ``parallelize``.
        experts: the implementation of a mixture's experts.
        shipped: transformers maps the model type to a causal language model and ships a plan for it.
        unplanned: transformers maps the model type to a causal language model and ships no plan for its layers.
        default_float64: its code makes tensors without a dtype, which have to be of its weights' one.
        wide: has a part for each of eight ranks.
    """

    name: str
    model_type: str
    class_name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    experts: str = "eager"
    shipped: bool = False
    unplanned: bool = False
    default_float64: bool = False
    wide: bool = False


_MINISTRAL3 = {"model_type": "ministral3"}

#: Rows besides those that transformers maps to a causal language model with a plan.
OTHERS = (
    Entry("cohere, head norms", "cohere", "CohereForCausalLM", {"use_qk_norm": True}),
    Entry("deepseek_v3, whole queries", "deepseek_v3", "DeepseekV3ForCausalLM", {"q_lora_rank": None}),
    Entry("doge, mixture", "doge", "DogeForCausalLM", {"is_moe": True}),
    Entry("falcon_h1, norm", "falcon_h1", "FalconH1ForCausalLM", {"mamba_rms_norm": True}),
    Entry("gemma4_text, keys as values", "gemma4_text", "Gemma4ForCausalLM", {"attention_k_eq_v": True}),
    Entry("llama, biases", "llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    Entry("llama, Nemotron's plan", "llama", "LlamaForCausalLM", options={"plan": "llama_nemotron_super_tp_plan"}),
    Entry("llama, one key head", "llama", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    Entry("mistral3", "mistral3", "Mistral3ForConditionalGeneration"),
    Entry("mistral3, ministral3", "mistral3", "Mistral3ForConditionalGeneration", {"text_config": _MINISTRAL3}),
    Entry("mixtral, batched", "mixtral", "MixtralForCausalLM", experts="batched_mm"),
    Entry("phi, head norms", "phi", "PhiForCausalLM", {"qk_layernorm": True}),
    Entry("qwen3, classifier", "qwen3", "Qwen3ForSequenceClassification", {"num_labels": 3}),
    Entry("qwen3_5, vision", "qwen3_5", "Qwen3_5ForConditionalGeneration"),
    Entry("qwen3_5_moe, vision", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    *(Entry(name, "", type(build()).__name__) for name, build in REMOTE_CODE_MODELS.items()),
)


#: Rows that cannot be built, and why.
UNBUILDABLE = {"gemma3n": "its vision tower needs timm, and gemma3n_text has all that is split"}


@cache
def entries() -> dict[str, Entry]:
    """Every row whose layers have a plan, of ours or of transformers, by its name."""
    return {entry.name: entry for entry in (*planned_causal_models(), *OTHERS)}


@cache
def coverage_entries() -> dict[str, Entry]:
    """Every row of the coverage page by its name: with a plan, or with one that has to be inferred."""
    return entries() | {entry.name: entry for entry in unplanned_causal_models()}


def row_or_skip(name: str) -> Entry:
    """Return a row of the coverage page; skip the test on a transformers before 5.24 that lacks the row."""
    if name not in coverage_entries() and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return coverage_entries()[name]


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
            fields = UNPLANNED.get(model_type, {})  # older releases ship no plan
            float64 = model_type in DEFAULT_FLOAT64
            found.append(Entry(model_type, model_type, class_name, fields, shipped=True, default_float64=float64))
    return found


def unplanned_causal_models() -> list[Entry]:
    """Decoders that the installed transformers ships no plan for, or one for the head alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    planned = {entry.name for entry in planned_causal_models()}
    return [
        Entry(name, name, CLASSES[name], fields, unplanned=True, default_float64=name in DEFAULT_FLOAT64)
        for name, fields in UNPLANNED.items()
        if name in CLASSES and name not in planned  # older releases lack some, newer ones ship more plans
    ]


def deeper(entry: Entry, layers: int) -> Entry:
    """Return the row with more blocks, of its kinds of layers in turn."""
    changes = more_layers(text_fields(entry.model_type, entry.changes), layers)
    if "text_config" in changes:
        changes["text_config"] = {**entry.changes.get("text_config", {}), **changes["text_config"]}
    return replace(entry, changes={**entry.changes, **changes})


def tiny_model(entry: Entry, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """The tiny jittered model of a row, without dropout, the same on every rank.

    In float64 and float32 no parameter repeats a number, so that each tells where it belongs.
    """

    def build() -> nn.Module:
        torch.manual_seed(seed)
        with memory_filled():
            model = built(entry)
        prepare(model, dtype)
        return model

    return copy_of_one_build(build, (repr(entry), dtype, seed))


def prepare(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a new model, and fill and jitter its parameters; in float64 and float32 none repeats a number."""
    converted(model, dtype)
    _initialize_the_rest(model)
    _fill_routing_tables(model)
    jitter(model)
    for parameter in model.parameters():
        if parameter.dtype in (torch.float64, torch.float32):
            _change_repeated(parameter.data)


def _change_repeated(values: Tensor) -> None:
    """Add noise to the elements that repeat a number, until none does; in float32 some do by chance."""
    while _repeats(values):
        _, place, times = values.unique(return_inverse=True, return_counts=True)
        repeated = times[place] > 1
        values[repeated] += torch.randn_like(values[repeated]) * 0.01


def _repeats(values: Tensor) -> bool:
    ordered = values.flatten().sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a model in place, but for the parameters that its class keeps in float32."""
    model.to(dtype)
    for path in kept_in_float32(model):  # its code casts what it reads to match
        parameter = model.get_parameter(path)
        parameter.data = parameter.data.float()
    return model


def built(entry: Entry) -> nn.Module:
    """The tiny model of a row as its class initializes it."""
    return REMOTE_CODE_MODELS[entry.name]() if entry.name in REMOTE_CODE_MODELS else _hugging_face_model(entry)


def _hugging_face_model(entry: Entry) -> nn.Module:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class = getattr(transformers, entry.class_name)
    config = CONFIG_MAPPING[entry.model_type](**text_fields(entry.model_type, entry.changes, wide=entry.wide))
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()  # as AutoModelForCausalLM does
    options = {"experts_implementation": entry.experts} if model_class._can_set_experts_implementation() else {}
    model: nn.Module = model_class._from_config(config, **options)
    return model.eval()  # no dropout; gradients flow as in training


def text_fields(model_type: str, changes: Mapping[str, Any], *, wide: bool = False) -> dict[str, Any]:
    """The fields of a tiny config, with those of the text model inside it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]().to_dict()
    fields = tiny_fields(default) | EXTRAS.get(model_type, {}) | dict(changes)
    if wide:
        fields |= wider(fields) | WIDE_EXTRAS.get(model_type, {})
    if isinstance(default.get("text_config"), dict):
        text = fields.get("text_config", {})
        text_type = text.get("model_type", default["text_config"]["model_type"])
        fields["text_config"] = {**text_fields(text_type, text, wide=wide), "model_type": text_type}
    return fields


@contextmanager
def memory_filled() -> Iterator[None]:
    """Fill with NaN what would hold whatever was in memory, and so differ from rank to rank."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _initialize_the_rest(model: nn.Module) -> None:
    """Some classes leave a parameter to its checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all():
                parameter.normal_(std=0.05)


def _fill_routing_tables(model: nn.Module) -> None:
    """A table from token to experts comes with a checkpoint, and would send every token to the first one."""
    for module in model.modules():
        if isinstance(table := getattr(module, "tid2eid", None), torch.Tensor):
            scores = torch.rand(len(table), module.num_experts)  # a token's experts must differ
            table.copy_(scores.topk(table.shape[1]).indices)
