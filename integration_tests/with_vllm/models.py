"""Tiny models of the families that are tried, in sizes that vLLM's CPU backend has kernels for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from harness.models import tiny_config, tiny_model

#: Not a multiple of 64, to which vLLM pads it.
VOCAB = 307

_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "head_dim": 32, "num_key_value_heads": 2, "intermediate_size": 128}
#: vLLM's CPU kernel of experts pads what is no multiple of 32 per worker, and then cannot be updated.
_MIXTURE = {"moe_intermediate_size": 64}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {**_SIZES, "num_key_value_heads": 1}),
    "Qwen3, tied": ("Qwen3ForCausalLM", {**_SIZES, "tied": True}),
    "Gemma 3": ("Gemma3ForCausalLM", {**_SIZES, "tied": True}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {**_SIZES, **_MIXTURE}),
    "gpt-oss": ("GptOssForCausalLM", {**_SIZES, "intermediate_size": 64}),
}


def build(family: str, seed: int = 0) -> nn.Module:
    """A model of a family in float32, the same on every rank."""
    architecture, sizes = FAMILIES[family]
    return tiny_model(architecture, dtype=torch.float32, seed=seed, **sizes)


def write(family: str, folder: Path, *, weights: bool = False) -> Path:
    """Write what the engine starts from: a config and a tokenizer; weights for a trainer that starts from them too."""
    architecture, sizes = FAMILIES[family]
    config = tiny_config(architecture, **sizes)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    if weights:
        build(family).save_pretrained(folder)  # type: ignore[operator]
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="w2",
        pad_token="w0",
        unk_token="w0",
        chat_template="{% for message in messages %}{{ message.content }} {% endfor %}w3",  # w3: the answer begins
    )
    content = {"close_pattern": r"w2\s*", "content": "text"}
    answer = {"defaults": {"role": "assistant"}, "start_anchor": "w3", "fields": {"content": content}}
    tokenizer.response_template = answer
    tokenizer.save_pretrained(folder)
    return folder
