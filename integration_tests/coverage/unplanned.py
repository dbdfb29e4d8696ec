"""Decoders that transformers ships no plan for, and how each is built tiny.

Most configs have field names of their own, which the generic rule does not know.
"""

from __future__ import annotations

from typing import Any

_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 128, "n_inner": None}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

#: Model type to the fields of its tiny config, on top of the generic rule.
UNPLANNED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"n_layer": 2, "n_head": 8},
    "codegen": {**_GPT, "rotary_dim": 4},
    "cpmant": {"dim_head": 8, "dim_ff": 96, "num_hidden_layers": 2, "prompt_length": 4, "prompt_types": 4},
    "ctrl": {**_GPT, "dff": 96},
    "dbrx": {
        "d_model": 64,
        "n_heads": 8,
        "n_layers": 2,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "diffllama": {"head_dim": 8},
    "falcon": {"num_kv_heads": 8, "new_decoder_architecture": False, "multi_query": True, "ffn_hidden_size": 256},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "intermediate_size": 128},
    "gpt2": {**_GPT},
    "gpt_bigcode": {**_GPT},
    "gpt_neo": {"num_layers": 2, "num_heads": 8, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gpt_neox_japanese": {},
    "gpt_oss": {},
    "gptj": {**_GPT, "rotary_dim": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "jetmoe": {"kv_channels": 16, "num_local_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm3": {},
    "mamba": {"state_size": 8, "time_step_rank": 4, "intermediate_size": 128},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 4},
    "modernbert-decoder": {"layer_types": ["full_attention", "sliding_attention"], "local_attention": 8},
    "mpt": {"d_model": 64, "n_heads": 8, "n_layers": 2, "max_seq_len": 128},
    "openai-gpt": {**_GPT},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "recurrent_gemma": {"lru_width": 64, "num_hidden_layers": 3, "attention_window_size": 4},
    "rwkv": {"attention_hidden_size": 64, "context_length": 128},
    "stablelm": {},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 8, "ffn_dim": 96},
    "xlstm": {"num_heads": 4, "num_blocks": 2},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_head_dim": 16,
        "num_key_value_heads": 8,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "adapter_rank": 16,
        "num_key_value_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}

#: Model types whose code makes tensors without a dtype, and combines them with those of its weights' dtype.
DEFAULT_FLOAT64 = {"xglm"}
