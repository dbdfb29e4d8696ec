"""The tiny sizes of encoders and of encoder-decoders, whose configs have field names of their own."""

from __future__ import annotations

from typing import Any

from coverage.shrink import VOCAB

BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
}
T5: dict[str, Any] = {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 8}
T5["decoder_start_token_id"] = 0
_T5GEMMA: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
}

_XLM: dict[str, Any] = {"emb_dim": 64, "n_layers": 2, "n_heads": 8}
_SPARSE: dict[str, Any] = {"num_experts": 4, "expert_capacity": 64}

#: Model type to the fields of its tiny config, on top of the generic rule.
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "m2m_100", "mbart", "mvp"), BART),
    **dict.fromkeys(("pegasus", "plbart"), BART),
    **dict.fromkeys(("t5", "mt5", "umt5"), T5),
    "bigbird_pegasus": {**BART, "attention_type": "original_full"},
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 8},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 0, "position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": 8, "head_dim": 8},
    "flaubert": _XLM,
    "fsmt": {**BART, "src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 64, "n_head": 8, "d_head": 8, "d_inner": 96},
    "led": {
        **BART,
        "attention_window": 4,
        "max_encoder_position_embeddings": 128,
        "max_decoder_position_embeddings": 128,
    },
    "longformer": {"attention_window": 4},
    "longt5": {**T5, "local_radius": 3, "global_block_size": 4},
    "luke": {"entity_vocab_size": 32, "entity_emb_size": 16},
    "marian": {**BART, "decoder_vocab_size": VOCAB, "decoder_start_token_id": 0, "forced_eos_token_id": 2},
    "mobilebert": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "true_hidden_size": 32,
        "embedding_size": 32,
        "intra_bottleneck_size": 32,
    },
    "nllb-moe": {**BART, **_SPARSE, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "pegasus_x": {**BART, "block_size": 4, "num_global_tokens": 4},
    "prophetnet": {
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 8,
        "num_decoder_attention_heads": 8,
    },
    "perceiver": {
        "num_latents": 8,
        "d_latents": 64,
        "d_model": 64,
        "num_self_attends_per_block": 2,
        "max_position_embeddings": 7,  # the length of all rows
    },
    "reformer": {
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh"],
        "feed_forward_size": 96,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "hash_seed": 0,
        "axial_pos_shape": [2, 4],  # the product is the length of all rows
        "axial_pos_embds_dim": [16, 48],
        "hidden_dropout_prob": 0.0,  # its backward needs the training mode
        "local_attention_probs_dropout_prob": 0.0,
    },
    "roc_bert": {"pronunciation_embed_dim": 16, "pronunciation_vocab_size": 32, "shape_embed_dim": 16}
    | {"shape_vocab_size": 32},
    "squeezebert": {"embedding_size": 64},
    "switch_transformers": {**T5, **_SPARSE, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "xlm": _XLM,
    "xmod": {"default_language": "en_XX"},
    "t5gemma": {"encoder": _T5GEMMA, "decoder": _T5GEMMA},
}
#: Models whose inputs are more than a few tokens: they are rows of the section on multimodal models, or have no tiny
#: config.
OTHER_INPUTS = (
    *("audioflamingo3", "encoder-decoder", "glmasr", "granite_speech", "granite_speech_plus"),
    *("modernvbert", "moss_transcribe_diarize", "musicflamingo", "nemo_speechlm", "omniasr", "qwen2_audio"),
    *("qwen3_asr", "seamless_m4t", "seamless_m4t_v2", "ultravbert", "vibevoice_asr", "voxtral", "voxtral_realtime"),
)
#: What single rows need besides.
CHANGES: dict[tuple[str, str], dict[str, Any]] = {}
