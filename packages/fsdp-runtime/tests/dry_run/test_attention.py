"""A dry run holds no scores of attention that an accelerator's kernel would not hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from fsdp_runtime._torch_compat import varlen_operators
from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.dry_run.trace.kernels import varlen_flops

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
    "window": lambda: transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=512),
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


def test_windows_over_cp_hold_no_mask_and_compute_their_keys_only() -> None:
    options: Any = {"clip": False, "logprobs": "linear"}
    short, long = (estimate(MODELS["window"](), {"cp": 4}, seq_len=tokens, **options) for tokens in (8192, 32_768))
    assert long.memory.peak.total < 5 * short.memory.peak.total
    assert long.flops_by_kind["attention"] / short.flops_by_kind["attention"] == pytest.approx(4)


@pytest.mark.parametrize(("window", "keys"), [(-1, 48), (15, 32)])  # a window's scores count twice
def test_varlen_flops_equal_torchs_formulas_of_one_segment_per_row(window: int, keys: int) -> None:
    rows, heads, queries, width = 3, 4, 16, 8
    query, key = torch.empty(rows * queries, heads, width), torch.empty(rows * 48, heads, width)
    before = torch.empty(rows + 1)
    shapes = [(rows, heads, queries, width), (rows, heads, keys, width), (rows, heads, keys, width)]
    forward = (query, key, key, before, before, queries, 48, False, None, [window, 0])
    assert varlen_flops(varlen_operators()[0], forward) == sdpa_flop_count(*shapes)
    lse = torch.empty(heads, len(query))
    backward = (query, query, key, key, query, lse, before, before, queries, 48, False, lse, None, [window, 0])
    assert varlen_flops(varlen_operators()[1], backward) == sdpa_backward_flop_count(shapes[0], *shapes)
