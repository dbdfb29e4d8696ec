"""A dry run holds no scores of attention that an accelerator's kernel would not hold."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from fsdp_runtime.dry_run import Estimate, estimate

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
}
#: Latent attention, whose values are narrower than its queries, and attention that drops weights.
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
MODELS = {
    "latent": lambda: transformers.DeepseekV3Config(**SIZES, **LATENT, **MIXTURE, first_k_dense_replace=1),
    "dropout": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=4, attention_dropout=0.1),
}


def run(name: str, tokens: int, axes: dict[str, int]) -> Estimate:
    return estimate(
        MODELS[name](), axes, seq_len=tokens, activation_checkpointing="block", clip=False, logprobs="linear"
    )


@pytest.mark.parametrize(("name", "axes"), [("latent", {"tp": 2}), ("latent", {"cp": 2}), ("dropout", {"tp": 2})])
def test_memory_and_scores_do_not_grow_with_the_square_of_the_tokens(name: str, axes: dict[str, int]) -> None:
    short, long = (run(name, tokens, axes) for tokens in (2048, 8192))
    grown = long.memory.peak.nbytes.temporaries / short.memory.peak.nbytes.temporaries
    assert 3 < grown < 5
    attention = long.flops_by_kind["attention"] / short.flops_by_kind["attention"]
    assert attention == pytest.approx(16)  # operations do
