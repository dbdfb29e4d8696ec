"""Llama (2, 3, 3.x) and the models that keep its names: q, k, v, o and a gated MLP, two norms a block."""

from __future__ import annotations

from tp_plans.decoder import Decoder, Mixer
from tp_plans.families.entry import Architecture

ATTENTION = Mixer(path="self_attn", columns=("q_proj", "k_proj", "v_proj"), row="o_proj", unit="head_dim")
GATED_MLP = Mixer(path="mlp", columns=("gate_proj", "up_proj"), row="down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")

LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    model_type="llama",
    decoder=Decoder(mixers=(ATTENTION, GATED_MLP), norms=NORMS),
)
