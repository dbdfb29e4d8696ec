"""Architectures with code in their checkpoints, found by the class name in the config.

Source: the module trees of the published checkpoints, as the plans of NeMo Automodel name them.
"""

from __future__ import annotations

from dataclasses import replace

from tp_plans.models.llama import ATTENTION, GATED_MLP, LLAMA, NORMS
from tp_plans.models.spec import Architecture, DecoderSpec, FusedLinear, ReplicatedSublayer, SublayerSpec

#: Code older than transformers 4.48 reads head counts from the attention layer.
_ATTENTION = replace(
    ATTENTION, head_count_attrs=("num_heads", "num_key_value_heads"), kv_heads_attr="num_key_value_heads"
)

_PACKED_ATTENTION = SublayerSpec(
    path="self_attn",
    colwise=(FusedLinear(name="W_pack", fused_sizes=(1, 1, 1)),),
    rowwise="o_proj",
    multiple_of="head_dim",
    head_count_attrs=("num_heads", "hidden_size"),
)

BAICHUAN = Architecture(
    class_name="BaichuanForCausalLM",
    model_type="baichuan",
    decoder=DecoderSpec(sublayers=(_PACKED_ATTENTION, GATED_MLP), norms=NORMS),
    notes="fused W_pack: each rank fetches its part of every piece in forward; NormHead split on the vocabulary",
)
DECILM = Architecture(
    class_name="DeciLMForCausalLM",
    model_type="nemotron-nas",
    decoder=DecoderSpec(
        sublayers=(
            replace(_ATTENTION, replacement_linears=("linear_attn",)),
            replace(GATED_MLP, replacement_linears=("linear_mlp",)),
        ),
        norms=NORMS,
    ),
    notes="blocks may lack attention or MLP, or have one matrix in its place",
)
NEMOTRON_LABS_DIFFUSION = Architecture(
    class_name="NemotronLabsDiffusionModel",
    model_type="nemotron_labs_diffusion",
    decoder=replace(LLAMA.decoder, sublayers=(_ATTENTION, GATED_MLP), root="encoder", lm_head="diffusion_head"),
)
NEMOTRON_FLASH = Architecture(
    class_name="NemotronFlashForCausalLM",
    model_type="nemotron_flash",
    decoder=DecoderSpec(
        sublayers=(
            _ATTENTION,
            ReplicatedSublayer(path="gla", linears=("q_proj", "k_proj", "v_proj", "o_proj")),
            ReplicatedSublayer(path="mamba", linears=("in_proj", "out_proj")),
            replace(GATED_MLP, path="ffn"),
        ),
        norms=("input_layernorm", "pre_ffn_layernorm"),
        final_norm="final_layernorm",
        optional=("self_attn", "gla", "mamba"),
    ),
    notes="recurrent layers compute the same on every rank; learned tokens are put before the sequence",
    sequence_parallel=False,
)
