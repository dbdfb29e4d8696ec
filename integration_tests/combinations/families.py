"""A tiny model of each family, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from coverage.heads import HeadRow, head_model
from coverage.table import coverage_entries
from coverage.table import tiny_model as tiny_row
from harness.models import tiny_model

#: Of the rows of the coverage page, those of one kind are alike in what they ask of a mesh.
FAMILIES: Mapping[str, Callable[[], nn.Module]] = {
    "dense": partial(tiny_model, "LlamaForCausalLM"),
    "tied": partial(tiny_model, "Qwen2ForCausalLM", tied=True),
    "head norms": partial(tiny_model, "Qwen3ForCausalLM", num_key_value_heads=2),
    "sliding window": partial(tiny_model, "Gemma3ForCausalLM"),
    "images": partial(tiny_model, "Gemma3ForConditionalGeneration"),
    "mixture": partial(tiny_model, "Qwen3MoeForCausalLM"),
    "sinks": partial(tiny_model, "GptOssForCausalLM"),
    "latent attention": lambda: tiny_row(coverage_entries()["deepseek_v3"]),
    "delta net": lambda: tiny_row(coverage_entries()["qwen3_next"]),
    "shared experts": lambda: tiny_row(coverage_entries()["glm4_moe"]),
    "encoder": lambda: head_model(HeadRow("eurobert", "masked", "EuroBertForMaskedLM")),
    "reward": lambda: head_model(HeadRow("qwen3", "reward", "Qwen3ForSequenceClassification")),
}
MIXTURES = ("mixture", "sinks", "latent attention", "delta net", "shared experts")
#: Families whose models generate.
DECODERS = tuple(name for name in FAMILIES if name not in ("encoder", "reward"))
