"""The tiny sizes of vision and audio towers, and what single model types need on top of them."""

from __future__ import annotations

from typing import Any

from coverage.shrink import HIDDEN, VOCAB

#: The tiny value of every size of a tower, whatever configs call it.
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "hidden_dim": 32,
    "intermediate_size": 48,
    "encoder_ffn_dim": 48,
    "mlp_dim": 48,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 4,
    "num_heads": 4,
    "head_dim": 8,
    "dim_head": 8,
    "image_size": 8,
    "patch_size": 2,
    "max_position_embeddings": 64,
    "max_source_positions": 16,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "num_patches": 16,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "out_hidden_size": HIDDEN,
    "output_dim": HIDDEN,
    "text_hidden_size": HIDDEN,
    "projector_hidden_size": 48,
    "projection_hidden_size": 48,
    "projection_intermediate_size": 48,
    "alignment_intermediate_size": 48,
    "encoder_hidden_size": 32,
    "projection_dim": 32,
    "num_query_tokens": 4,
    "mm_tokens_per_image": 4,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "window_size": 8,
    "num_mel_bins": 16,
    "downsample_hidden_size": 8,
    "conv_kernel_size": 3,
}

_SAM = {"output_channels": 16}
_TWO_CONVS = {"vision_config": {"sam_config": {**_SAM, "downsample_channels": [16, 32]}}}
_TILES = {"image_grid_pinpoints": [[16, 8]]}
_QUERIES = {"num_query_tokens": 4, "image_token_index": 120}
#: A tiny vector-quantised autoencoder, whose codes are the tokens of an image.
_CODES = {"num_embeddings": 8, "embed_dim": 8, "latent_channels": 8, "base_channels": 32, "num_res_blocks": 1}

_MERGED_AT_FIRST = {
    "insert_layer_id": 0,
    "vision_config": {"insert_layer_id": 0},
    "image_token_id": 130,
    "video_token_id": 129,
}

#: What single model types need besides.
CHANGES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "vision_config": {**_CODES, "codebook_size": 8, "channel_multiplier": [1, 1], "resolution": 8},
        "audio_config": {
            "hidden_size": 32,
            "codebook_dim": 32,
            "codebook_size": 8,
            "norm_type": "time_group_norm",
            "num_filters": 4,
        },
        "image_token_offset": 100,
        "audio_token_offset": 108,
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {**_QUERIES, "qformer_config": {"num_hidden_layers": 2}},
    "chameleon": {
        "vq_config": {**_CODES, "channel_multiplier": [1, 1], "resolution": 8},
        "vocabulary_map": {"<image>": 130, **{f"IMGIMG{chr(65 + code)}Z": 100 + code for code in range(8)}},
    },
    "deepseek_ocr2": {
        **_TWO_CONVS,
        "text_config": {
            "mlp_layer_types": ["dense", "sparse"],
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": _SAM},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "emu3": {
        "vq_config": {**_CODES, "codebook_size": 8, "channel_multiplier": [1, 1], "hidden_size": 32},
        "vocabulary_map": {
            "<image>": 130,
            "<|extra_200|>": 129,
            **{f"<|visual token {code:06d}|>": 100 + code for code in range(8)},
        },
    },
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 16]}},
    "florence2": {
        "vision_config": {
            "projection_dim": HIDDEN,
            "depths": [1, 1],
            "patch_size": [2, 3],
            "patch_stride": [2, 2],
            "patch_padding": [0, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [16, 32],
            "num_heads": [2, 4],
            "num_groups": [2, 4],
            "drop_path_rate": 0.0,
            "window_size": 2,
        },
        "text_config": {
            "d_model": HIDDEN,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
        },
    },
    "fun_asr_nano": {"adaptor_config": {"hidden_size": HIDDEN, "intermediate_size": HIDDEN // 4}},
    "gemma4": {
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [16, 4],
            "attention_chunk_size": 4,
            "attention_context_left": 5,
            "output_proj_dims": 48,
        }
    },
    "gemma4_unified": {"audio_config": {"audio_embed_dim": 32}},
    "glm5_next": {"text_config": {"index_topk": 16, "qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 2}},
    "glmasr": {"audio_config": {"intermediate_size": 128}},
    "got_ocr2": {"vision_config": _SAM},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "use_spatial_sampling": True,
        "downsample_rate": "1/2",
        "image_grid_pinpoints": [[8, 8]],
        "vision_config": {"hidden_size": HIDDEN},
        "qformer_config": {"cross_attention_frequency": 1, "hidden_size": HIDDEN, "encoder_hidden_size": HIDDEN},
    },
    "granite_speech": {"window_size": 15},
    "granite_speech_plus": {"window_size": 15},
    "hunyuan_vl": {"text_config": {"head_dim": 16}, "vision_config": {"max_image_size": 16, "img_max_token_num": 64}},
    "hy_v4_vl": {"vision_config": {"max_image_size": 16}},
    "inkling2": {"vision_config": {"posemb_grid_size": 4, "projection_hidden_dim": 48}},
    "inkling2_loop": {"vision_config": {"posemb_grid_size": 4, "projection_hidden_dim": 48}},
    "inkling_mm_model": {
        "vision_config": {"num_hidden_layers": 2, "n_layers": 2, "patch_size": 4},
        "audio_config": {"mel_vocab_size": 8, "n_mel_bins": 4},
    },
    "instructblip": {**_QUERIES, "qformer_config": {"num_hidden_layers": 2, "vocab_size": VOCAB}},
    "instructblipvideo": {
        **_QUERIES,
        "video_token_index": 120,
        "qformer_config": {"num_hidden_layers": 2, "vocab_size": VOCAB},
    },
    "janus": {
        "vision_config": {"projection_dim": HIDDEN},
        "vq_config": {**_CODES, "channel_multiplier": [1, 1], "projection_dim": HIDDEN, "num_patches": 4},
    },
    "kimi_k25": {"projection_hidden_size": 32},
    "kosmos-2": {
        "latent_query_num": 4,
        "text_config": {"embed_dim": HIDDEN, "layers": 2, "ffn_dim": 96, "attention_heads": 8},
    },
    "kosmos-2.5": {
        "latent_query_num": 4,
        "text_config": {"embed_dim": HIDDEN, "layers": 2, "ffn_dim": 96, "attention_heads": 8},
        "vision_config": {"patch_embed_hidden_size": 32, "max_num_patches": 16},
    },
    "kyutai_speech_to_text": {
        "codec_config": {"upsample_groups": 32, "num_filters": 4, "codebook_size": 16, "codebook_dim": 8},
        "ffn_dim": 96,
        "num_codebooks": 4,
    },
    "llama4": {
        "vision_config": {
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        }
    },
    "llava_next": _TILES,
    "llava_next_video": _TILES,
    "llava_onevision": _TILES,
    "minicpm_ocr": _MERGED_AT_FIRST,
    "minicpmv4_6": _MERGED_AT_FIRST,
    "minicpmv4_7": _MERGED_AT_FIRST,
    "mllama": {
        "vision_config": {
            "num_global_layers": 1,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
        },
        "text_config": {"cross_attention_layers": [1]},
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {
        "text_config": {"moe_hidden_size": 32},
        "out_hidden_size": 128,
        "audio_config": {
            "patch_sizes": [4, 2],
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "conv_kernel_size": 3,
        },
    },
    "nemo_speechlm": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
        "word_timestamp_config": {"vocab_size": 32, "blank_token_id": 31},
    },
    "nemotron_h_omni": {
        "image_token_id": 130,
        "video_token_id": 129,
        "audio_token_id": 128,
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "num_mel_bins": 16,
            "subsampling_conv_channels": 8,
            "projection_hidden_size": 48,
            "projection_bias": False,
            "conv_kernel_size": 3,
        },
        "vision_hidden_size": 32,
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 32, "intermediate_size": 128},
    },
    "omniasr": {
        "audio_config": {"conv_dim": [8] * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    },
    "ovis2": {"vision_config": {"vocab_size": 64}},
    "paligemma": {"vision_config": {"projection_dim": HIDDEN}, "projection_dim": HIDDEN},
    "phi4_multimodal": {
        "vision_config": {"crop_size": 8, "image_token_id": 130},
        "audio_config": {
            "audio_token_id": 129,
            "num_blocks": 2,
            "input_size": 16,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 16,
            "nemo_final_size": 2,
        },
    },
    "pix2struct": {
        "text_config": {"num_heads": 8, "d_ff": 96, "d_kv": 8, "num_layers": 2},
        "vision_config": {"hidden_size": HIDDEN, "seq_len": 16, "d_ff": 48, "d_kv": 16},
    },
    "pp_chart2table": {"vision_config": _SAM},
    "pp_formulanet": {
        "text_config": {
            "vocab_size": 131,
            "d_model": HIDDEN,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "decoder_ffn_dim": 96,
            "decoder_attention_heads": 8,
            "max_position_embeddings": 64,
        },
        "vision_config": {
            **_SAM,
            "post_conv_in_channels": 16,
            "post_conv_mid_channels": 32,
            "post_conv_out_channels": 32,
            "decoder_hidden_size": HIDDEN,
        },
    },
    "qwen2_vl": {"vision_config": {"hidden_size": HIDDEN}},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 4}},
    "unlimited_ocr": {**_TWO_CONVS, "text_config": {"num_key_value_heads": 8, "sliding_window": 4}},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
        "semantic_tokenizer_encoder_config": {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
    },
    "vision-encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "voxtral": {"audio_config": {"intermediate_size": 128}, "audio_token_id": 130},
    "vipllava": {"vision_feature_layer": [-2, -1]},
}
