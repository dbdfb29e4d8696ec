"""A test named after what transformers lacks fails once transformers has it; then remove the workaround too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MixtralConfig,
    MixtralModel,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping

from fsdp_runtime._transformers_compat.conversions import OLDEST
from fsdp_runtime._transformers_compat.models import original_classes

#: A public name that would replace a private one: the function that uses that, who would have it, its likely names.
ABSENT: dict[str, tuple[Any, set[str]]] = {
    "attention_in_force": (transformers.PretrainedConfig, {"attn_implementation", "attention_implementation"}),
    "has_model_for": (AutoModelForCausalLM, {"model_mapping", "supports", "has_model_for"}),
    "is_stateful": (PreTrainedModel, {"is_stateful"}),
    "kept_in_float32": (PreTrainedModel, {"keep_in_fp32_modules", "keep_in_fp32_modules_strict"}),
    "left_out_on_save": (PreTrainedModel, {"keys_to_ignore_on_save"}),
    "is_ignored_on_load": (PreTrainedModel, {"keys_to_ignore_on_load_unexpected"}),
    "initialize_module": (PreTrainedModel, {"init_module", "initialize_module", "init_buffers"}),
    "checkpointing_through": (PreTrainedModel, {"gradient_checkpointing_func", "set_gradient_checkpointing_func"}),
    "model_to_checkpoint": (PreTrainedModel, {"weight_conversions", "get_weight_conversions"}),
    "sdpa_mask_between": (transformers, {"sdpa_mask", "and_masks", "padding_mask_function"}),
    "is_causal_mask_function": (transformers, {"causal_mask_function"}),
    "checkpoint_to_model": (transformers, {"get_model_conversion_mapping", "rename_source_key"}),
    "fake_tensors_are_data": (transformers.utils, {"treat_fake_tensors_as_data", "set_is_fake_tensor"}),
}


@pytest.mark.parametrize("function", ABSENT)
def test_no_public_name_replaces_it(function: str) -> None:
    owner, names = ABSENT[function]
    public = set(getattr(owner, "__all__", ())) | {name for name in dir(owner) if name in vars(owner)}
    assert not names & public


def test_the_oldest_release_lacks_the_function_that_applies_renamings() -> None:
    assert OLDEST < (5, 22), "transformers 5.22 has one: use it in conversions.py, in the place of renamed"


def test_an_attention_that_is_not_replaceable_keeps_its_name_when_another_is_set() -> None:
    config = GPTNeoConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1, attention_types=[[["global"], 1]])
    model = GPTNeoForCausalLM(config)
    model.set_attn_implementation("flex_attention")
    assert model.config._attn_implementation == "eager"


def test_conversions_are_listed_by_the_class_name_that_fully_shard_changes() -> None:
    with torch.device("meta"):
        model = MixtralModel(MixtralConfig(hidden_size=32, num_hidden_layers=1, vocab_size=8))
    known = len(get_model_conversion_mapping(model))
    sharded = type("FSDPMixtralModel", (FSDPModule, MixtralModel), {"__module__": FSDPModule.__module__})
    model.__class__ = sharded
    assert len(get_model_conversion_mapping(model)) < known
    with original_classes(model):
        assert len(get_model_conversion_mapping(model)) == known
    assert type(model) is sharded
