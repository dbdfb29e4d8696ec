"""The tiny sizes of encoders and of encoder-decoders, whose configs have field names of their own."""

from __future__ import annotations

from typing import Any

_BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
}
_T5: dict[str, Any] = {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 8}
_T5["decoder_start_token_id"] = 0
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

#: Model type to the fields of its tiny config, on top of the generic rule.
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp"), _BART),
    **dict.fromkeys(("pegasus", "plbart"), _BART),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    "esmc": {"num_key_value_heads": 8, "head_dim": 8},
    "t5gemma": {"encoder": _T5GEMMA, "decoder": _T5GEMMA},
}
#: What single rows need besides.
CHANGES: dict[tuple[str, str], dict[str, Any]] = {}
