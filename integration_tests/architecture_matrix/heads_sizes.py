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
_DROPOUT: dict[str, Any] = {}

#: Model type to the fields of its tiny config, on top of the generic rule.
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp"), _BART),
    **dict.fromkeys(("pegasus", "plbart"), _BART),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
}
#: What single rows need besides.
CHANGES: dict[tuple[str, str], dict[str, Any]] = {}
