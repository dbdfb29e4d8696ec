"""What the generic rule cannot know of a model type: its own sizes, and options that bring in more kinds of parts."""

from __future__ import annotations

from typing import Any

_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
}

#: A vision tower that no input of ours reaches: it must build, and stay whole.
_UNUSED_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "depth": 1,
    "image_size": 8,
    "patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "mm_embed_dim": 32,
    "mm_posemb_size": 16,
    "output_proj_dims": 32,
}
_TOWER = {"vision_config": _UNUSED_TOWER}

_INKLING2: dict[str, Any] = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "rel_extent": 8,
    "unpadded_vocab_size": 131,
}

EXTRAS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "logit_scale": 0.5,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "o_groups": 4,
        "o_lora_rank": 16,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {
        "vision_config": {
            **_UNUSED_TOWER,
            "mlp_layer_types": ["dense"],
            "moe_intermediate_size": 16,
            "adapter_in_dim": 32,
            "adapter_out_dim": 64,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "downsample_hidden_size": 8,
            "adapter_input_size": 32,
            "adapter_out_dim": 64,
        },
    },
    "dots3_note_text": {
        "num_hidden_layers": 2,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "head_dim": 32,
        "per_layer_config": {
            1: {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 24}
        },
    },
    "gemma3": _TOWER,
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "vocab_size_per_layer_input": 127,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        **_GEMMA4,
        "vocab_size_per_layer_input": 131,
        "hidden_size_per_layer_input": 8,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma4_unified_text": _GEMMA4,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "rel_extent": 8,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "inkling2_text": _INKLING2,
    "inkling2_loop_text": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 16,
        **_INKLING2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2},
    "llama4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0, 1, 0],
        "interleave_moe_layer_step": 2,
        "moe_layers": [1, 3],
    },
    "minimax_m3_vl_text": {"mlp_layer_types": ["dense", "sparse"], "rotary_dim": 8},
    "ministral": {"head_dim": 16, "layer_types": ["full_attention", "sliding_attention"]},
    "nemotron": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 4,
        "split_ngram_parts": 2,
    },
}
EXTRAS |= dict.fromkeys(
    ("gemma4", "gemma4_unified", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), _TOWER
)
EXTRAS["phi4_multimodal"] = {
    "vision_config": {**_UNUSED_TOWER, "num_hidden_layers": 2, "crop_size": 8},
    "audio_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_blocks": 2,
        "num_attention_heads": 2,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 16,
    },
}

_EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
#: What a model type needs so that each of eight ranks has a part.
WIDE_EXTRAS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "doge": {"num_key_value_heads": 8},
    "dots3_note_text": {
        "per_layer_config": {1: {"kv_lora_rank": 24, "qk_nope_head_dim": 24, **_EIGHT_HEADS}},
    },
    "gemma3n_text": {"num_key_value_heads": 2},  # as Gemma 3n has: ranks share them, also in layers without their own
    "longcat_flash": {"zero_expert_num": 8},
    "phi4_multimodal": {
        "vision_config": {**EXTRAS["phi4_multimodal"]["vision_config"], **_EIGHT_HEADS},
        "audio_config": {**EXTRAS["phi4_multimodal"]["audio_config"], "num_attention_heads": 8},
    },
    "xlstm": {"num_heads": 8},
}
