"""Tests of the balance of stages by operations and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, JetMoeConfig, LlamaConfig, MixtralConfig

from fsdp_runtime.model import inspect_model
from fsdp_runtime.steps.pipeline.step import balanced

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}


def _counts(config: Any, stages: int) -> tuple[int, ...]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return balanced(inspect_model(model), stages)


@pytest.mark.parametrize("tied", [False, True])
def test_balanced_gives_the_stage_of_a_large_head_fewer_blocks(tied: bool) -> None:
    assert _counts(LlamaConfig(**SIZES), 4) == (3, 3, 3, 3)
    block = 4 * 64 * 64 + 3 * 64 * 128
    large = SIZES | {"vocab_size": 2 * block // 64, "tie_word_embeddings": tied}  # a head of the work of two blocks
    counts = _counts(LlamaConfig(**large), 4)
    assert counts[-1] == min(counts) < 3
    assert max(*counts[:-1], counts[-1] + 2) == 4


def test_balanced_counts_the_experts_that_a_token_uses() -> None:
    experts = {"num_local_experts": 32, "num_experts_per_tok": 1}
    assert _counts(MixtralConfig(**SIZES | experts), 2) == _counts(LlamaConfig(**SIZES), 2) == (6, 6)
    block = 4 * 64 * 64 + 3 * 64 * 128
    counts = _counts(MixtralConfig(**SIZES | experts | {"vocab_size": 4 * block // 64}), 2)
    assert counts == (8, 4)  # by parameters the head would weigh a tenth of a block


def test_balanced_weighs_dense_blocks_before_a_mixture_by_their_work() -> None:
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    dense = {"first_k_dense_replace": 6, "intermediate_size": 512, "n_group": 1, "topk_group": 1}
    counts = _counts(DeepseekV3Config(**SIZES | experts | latent | dense), 2)
    assert counts[0] < 6  # a dense block multiplies more than three experts


def test_balanced_counts_all_experts_of_a_mixture_with_unknown_routers() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_attention_heads"}
    assert _counts(JetMoeConfig(**sizes, kv_channels=16, num_local_experts=4, num_experts_per_tok=1), 3) == (4, 4, 4)
