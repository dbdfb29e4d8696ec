"""The matrices in fused weights, from the plan of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import tp_plans
from tp_plans.runtime import fused_rows

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def _model(name: str, **sizes: Any) -> Any:
    cls = getattr(transformers, name)
    with torch.device("meta"):
        return cls(cls.config_class(**_SIZES, vocab_size=64, pad_token_id=0, **sizes))


@pytest.mark.parametrize("plan", [None, "own"])
def test_fused_rows_of_phi3_are_queries_keys_values_gate_and_up(plan: str | None) -> None:
    model = _model("Phi3ForCausalLM", num_key_value_heads=2)
    rows = fused_rows(model, None if plan is None else tp_plans.plan_for(model, plan))
    layer = "model.layers.0"
    assert rows == {f"{layer}.self_attn.qkv_proj": (32, 16, 16), f"{layer}.mlp.gate_up_proj": (48, 48)}


def test_fused_rows_of_latent_attention_are_the_latent_and_the_rotary_key() -> None:
    model = _model("DeepseekV2ForCausalLM", kv_lora_rank=24, qk_rope_head_dim=8, n_routed_experts=4)
    assert fused_rows(model) == {"model.layers.0.self_attn.kv_a_proj_with_mqa": (24, 8)}


def test_fused_rows_of_a_model_without_a_plan_are_none() -> None:
    assert fused_rows(torch.nn.Sequential(torch.nn.Linear(2, 2))) == {}
