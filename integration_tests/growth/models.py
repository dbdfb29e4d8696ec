"""Models of any size on the meta device, and shapes of checkpoints."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from tp_plans.transfer import CheckpointTensor


def llama(layers: int, *, vocab: int = 64, width: int = 32) -> nn.Module:
    """A Llama, with small layers unless they are to be cut over many ranks."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return _on_meta(config)


def mixture(layers: int, experts: int) -> nn.Module:
    """A Qwen3 mixture of small experts."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=2,
    )
    return _on_meta(config)


def matrices(count: int, rows: int = 4096, columns: int = 4096) -> dict[str, CheckpointTensor]:
    """Matrices of a checkpoint, by name."""
    return {f"model.layers.{number}.mlp.down_proj.weight": CheckpointTensor((rows, columns)) for number in range(count)}


def _on_meta(config: object) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model
