"""Llama (2, 3, 3.x) and the models that keep its names: q, k, v, o and a gated MLP, two norms a block.

Source: the module tree of transformers' ``modeling_llama.py``, ``modeling_ministral3.py`` and ``modeling_mistral3.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tp_plans.models.spec import Architecture, DecoderSpec, SublayerSpec

ATTENTION = SublayerSpec(
    path="self_attn",
    colwise=("q_proj", "k_proj", "v_proj"),
    rowwise="o_proj",
    multiple_of="head_dim",
    kv_projections=("k_proj", "v_proj"),
)
GATED_MLP = SublayerSpec(path="mlp", colwise=("gate_proj", "up_proj"), rowwise="down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")

LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    model_type="llama",
    decoder=DecoderSpec(sublayers=(ATTENTION, GATED_MLP), norms=NORMS),
    aliases=("llama_nemotron_super_tp_plan",),
)
MISTRAL = replace(LLAMA, class_name="MistralForCausalLM", model_type="mistral", aliases=())
MINISTRAL3 = replace(LLAMA, class_name="Ministral3ForCausalLM", model_type="ministral3", aliases=())
MISTRAL3 = Architecture(
    class_name="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    decoder=replace(LLAMA.decoder, root="model.language_model", merges_embeds_before_root=True),
    notes="vision tower and projector replicated",
)
