"""A Llama of 80 layers, with the sizes of the 70B model and without weights."""

from __future__ import annotations

import torch
import transformers
from torch import nn


def deep_model() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)
