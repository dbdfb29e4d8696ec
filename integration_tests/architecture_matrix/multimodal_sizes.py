"""The tiny sizes of vision and audio towers, and what single model types need on top of them."""

from __future__ import annotations

from typing import Any

from architecture_matrix.shrink import HIDDEN

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
_TILES = {"image_grid_pinpoints": [[16, 8]]}

#: What single model types need besides.
CHANGES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 16]}},
    "glm5_next": {"text_config": {"index_topk": 16}},
    "got_ocr2": {"vision_config": _SAM},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "use_spatial_sampling": True,
        "qformer_config": {"cross_attention_frequency": 1},
    },
    "hunyuan_vl": {"text_config": {"head_dim": 16}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "ovis2": {"vision_config": {"vocab_size": 64}},
    "florence2": {"vision_config": {"projection_dim": HIDDEN}},
    "paligemma": {"vision_config": {"projection_dim": HIDDEN}, "projection_dim": HIDDEN},
    "qwen2_vl": {"vision_config": {"hidden_size": HIDDEN}},
    "llava_next": _TILES,
    "llava_next_video": _TILES,
    "llava_onevision": _TILES,
    "llama4": {"vision_config": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}},
    "pp_chart2table": {"vision_config": _SAM},
    "step3p7": {"text_config": {"sliding_window": 4}},
}
