"""Llama (2, 3, 3.x) and the models that keep its names: q, k, v, o and a gated MLP, two norms a block.

Source: the module tree of transformers' ``modeling_llama.py``, ``modeling_ministral3.py`` and ``modeling_mistral3.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tp_plans.decoder import Decoder, Mixer
from tp_plans.families.entry import Architecture

ATTENTION = Mixer(
    path="self_attn",
    columns=("q_proj", "k_proj", "v_proj"),
    row="o_proj",
    unit="head_dim",
    shared=("k_proj", "v_proj"),
)
GATED_MLP = Mixer(path="mlp", columns=("gate_proj", "up_proj"), row="down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")

LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    model_type="llama",
    decoder=Decoder(mixers=(ATTENTION, GATED_MLP), norms=NORMS),
    aliases=("llama_nemotron_super_tp_plan",),
)
MISTRAL = replace(LLAMA, class_name="MistralForCausalLM", model_type="mistral", aliases=())
MINISTRAL3 = replace(LLAMA, class_name="Ministral3ForCausalLM", model_type="ministral3", aliases=())
MISTRAL3 = Architecture(
    class_name="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    decoder=replace(LLAMA.decoder, root="model.language_model", embeds_outside=True),
    notes="vision tower and projector replicated",
)
