"""Speech recognizers that encode audio and decode text: their tiny sizes, and the inputs of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coverage.heads_sizes import BART, T5
from coverage.shrink import HIDDEN, VOCAB

#: Rows, frames of a spectrogram and its bins.
_ROWS, _FRAMES, _BINS = 3, 32, 16
#: Frames that are padding in the first row.
_PADDING = 8

_BLOCKS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
}
_CONFORMER = {**_BLOCKS, "subsampling_conv_channels": 16, "num_mel_bins": _BINS}
_DECODER = {**_BLOCKS, "head_dim": 16, "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_STARTS = {"decoder_start_token_id": 1}
_SEAMLESS: dict[str, Any] = {
    **{name: size for name, size in BART.items() if name != "d_model"},
    **_STARTS,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 8,
    "speech_encoder_intermediate_size": 96,
    "feature_projection_input_dim": _BINS,
    "num_conv_pos_embeddings": 16,
    "conv_depthwise_kernel_size": 3,
    "max_source_positions": 64,
}

#: Model type to the fields of its tiny config, on top of the generic rule.
SPEECH_SIZES: dict[str, dict[str, Any]] = {
    "canary": {"encoder_config": _CONFORMER, "decoder_config": _DECODER, **_STARTS},
    "cohere_asr": {"encoder_config": _CONFORMER, "num_key_value_heads": 8, **_STARTS},
    "dia": {
        "encoder_config": {**_BLOCKS, "head_dim": 16, "vocab_size": VOCAB},
        "decoder_config": {
            **_DECODER,
            "cross_num_attention_heads": 8,
            "cross_num_key_value_heads": 8,
            "cross_head_dim": 16,
            "cross_hidden_size": HIDDEN,
            "num_channels": 3,
        },
        "delay_pattern": [0, 1, 2],
    },
    "moonshine": {
        **{f"{part}_num_hidden_layers": 2 for part in ("encoder", "decoder")},
        **{f"{part}_num_attention_heads": 4 for part in ("encoder", "decoder")},
        **{f"{part}_num_key_value_heads": 4 for part in ("encoder", "decoder")},
    },
    "moonshine_streaming": {
        "encoder_config": {**_BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
        | {"sliding_windows": [[4, 1], [4, 0]]},
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        **_STARTS,
    },
    "pop2piano": T5,
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": _SEAMLESS,
    "speech_to_text": {
        **BART,
        **_STARTS,
        "conv_channels": 32,
        "input_feat_per_channel": _BINS,
        "max_source_positions": 64,
        "max_target_positions": 64,
    },
    "speecht5": {
        **BART,
        **_STARTS,
        "conv_dim": [32, 32],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    },
    "whisper": {
        **BART,
        **_STARTS,
        "num_mel_bins": _BINS,
        "max_source_positions": _FRAMES // 2,
        "max_target_positions": 64,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}


def _features(*, frames_first: bool = True, frames: int = _FRAMES, bins: int = _BINS, mask: bool = True) -> Any:
    def build(generator: torch.Generator) -> dict[str, Tensor]:
        shape = (_ROWS, frames, bins) if frames_first else (_ROWS, bins, frames)
        found = {"input_features": torch.randn(shape, generator=generator).double()}
        if mask:
            found["attention_mask"] = torch.ones(_ROWS, frames, dtype=torch.long)
            found["attention_mask"][0, -_PADDING:] = 0
        return found

    return build


def _wave(samples: int) -> Any:
    return lambda generator: {"input_values": torch.randn(_ROWS, samples, generator=generator).double()}


def _codes(generator: torch.Generator) -> dict[str, Tensor]:
    """Return text to speak and the codes of the audio so far, several at each place."""
    return {
        "input_ids": torch.randint(3, VOCAB, (_ROWS, 7), generator=generator),
        "decoder_input_ids": torch.randint(3, VOCAB, (_ROWS, 5, 3), generator=generator),
    }


#: Model type to what makes the inputs of its encoder.
SPEECH_INPUTS: dict[str, Callable[[torch.Generator], dict[str, Tensor]]] = {
    "canary": _features(frames=64),
    "cohere_asr": _features(frames=64),
    "dia": _codes,
    "moonshine": _wave(3000),
    "moonshine_streaming": _wave(1600),
    "pop2piano": _features(frames=7, bins=HIDDEN, mask=False),
    "seamless_m4t": _features(),
    "seamless_m4t_v2": _features(),
    "speech_to_text": _features(),
    "speecht5": _wave(200),
    "whisper": _features(frames_first=False, mask=False),
}
