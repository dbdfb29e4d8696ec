"""A config of transformers at small sizes, with the same kinds of layers.

Common sizes are replaced wherever they are set; numbers of layers become one of each kind.  Other fields stay, so that
the model may fail to build, or be large.  The caller then tries other methods.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from tp_plans._validate import is_integer
from tp_plans.verification.inputs import SPECIAL_TOKEN

_VOCABULARY, _HEAD = 131, 16
#: Tokens that may share an id.
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

#: Lists with one entry per layer; one layer of every kind stays.
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
#: Further sizes of models with many layers.
_PER_LAYER = {
    "vocab_size_per_layer_input": _VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
#: Fields that count the layers of the decoder.
_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"),
    *("encoder_layers", "decoder_layers", "num_decoder_layers", "layers", "speech_encoder_layers"),
    *("encoder_num_hidden_layers", "decoder_num_hidden_layers"),
)
_INNER = (
    *("intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "dim_ff", "n_inner"),
    *("d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "speech_encoder_intermediate_size"),
)
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads", "speech_encoder_attention_heads"),
    *("encoder_num_attention_heads", "decoder_num_attention_heads"),
)


#: One width serves the language model, its towers, and the projectors between them.
_WIDTHS = (
    *("hidden_size", "n_embd", "d_model", "lru_width", "attention_hidden_size", "embed_dim"),
    *("encoder_hidden_size", "vision_embed_dim", "projection_dim", "out_hidden_size", "text_hidden_size"),
    *("decoder_hidden_size", "upsample_groups"),
)
#: Lists with one entry a stage of a tower.
_STAGES = {"embed_dim": "embed_dim", "num_heads": "num_heads", "num_groups": "num_heads", "depths": "depths"}


def _sizes(tp: int) -> dict[str, int]:
    kv_heads = (
        *("num_key_value_heads", "num_kv_heads", "kv_n_heads"),
        *("encoder_num_key_value_heads", "decoder_num_key_value_heads"),
    )
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    chosen = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
    windows = ("sliding_window", "attention_window_size", "window_size", "mamba_chunk_size", "chunk_size")
    positions = (
        *("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "model_max_length"),
        *("max_source_positions", "max_target_positions"),
    )
    return {
        "vocab_size": _VOCABULARY,
        **dict.fromkeys(_WIDTHS, 64 * tp),
        **dict.fromkeys(_INNER, 24 * tp),
        **dict.fromkeys(_HEADS, 4 * tp),
        **dict.fromkeys(kv_heads, 2 * tp),
        **dict.fromkeys(("head_dim", "kv_channels", "d_kv"), _HEAD),
        **dict.fromkeys(experts, 2 * tp),
        **dict.fromkeys(chosen, 2),
        **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
        **dict.fromkeys(positions, 128),
        **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 16 * tp),
        **dict.fromkeys(("rotary_dim", "qk_rope_head_dim"), 8),
        **dict.fromkeys(("q_lora_rank", "adapter_rank"), 24),
        **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "num_filters"), 16),
        **dict.fromkeys(windows, 4),
        "cross_layer_interval": 2,
        **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    }


def shrunk_config(config: Any, *, tp: int, all_blocks: bool = False) -> Any:
    """Return a copy of a config at small sizes, heads and experts being multiples of ``tp``."""
    fields = config.to_dict()
    return type(config).from_dict(_shrunk(fields, tp) if not all_blocks else _as_deep(fields, _shrunk(fields, tp)))


def _as_deep(fields: Mapping[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Return the small fields with the original numbers and kinds of layers."""
    for name, value in fields.items():
        if name in (*_LAYERS, *_KINDS):
            small[name] = value
        elif name in _PER_LAYER and is_integer(value):
            small[name] = _PER_LAYER[name]
        elif isinstance(value, dict) and isinstance(small.get(name), dict):
            small[name] = _as_deep(value, small[name])
    return small


def _shrunk(fields: Mapping[str, Any], tp: int) -> dict[str, Any]:
    small, sizes = dict(copy.deepcopy(fields)), _sizes(tp)
    for name, size in sizes.items():
        if is_integer(small.get(name)):
            small[name] = min(size, small[name]) if name in ("num_experts_per_tok", "moe_k") else size
    if is_integer(fields.get("qk_rope_head_dim")):  # latent attention: each head has keys, and a part of it rotates
        for name, like in {"head_dim": "qk_rope_head_dim", "num_key_value_heads": "num_attention_heads"}.items():
            if is_integer(fields.get(name)) and fields[name] == fields.get(like):
                small[name] = small[like]
    if "word_embed_proj_dim" in fields and fields["word_embed_proj_dim"] == fields.get("hidden_size"):
        small["word_embed_proj_dim"] = small["hidden_size"]  # else OPT has projections in between
    for name, like in _STAGES.items():
        if isinstance(stages := small.get(name), (list, tuple)):
            small[name] = [sizes.get(like, 1)] * len(stages)
    kinds = {name: list(dict.fromkeys(small[name])) for name in _KINDS if isinstance(small.get(name), list)}
    layers = max([2, *map(len, kinds.values())])
    small |= {
        name: list(islice(cycle(kinds_of_layers), layers)) for name, kinds_of_layers in kinds.items() if kinds_of_layers
    }
    small |= {name: layers for name in _LAYERS if isinstance(small.get(name), int)}
    if small.get("cross_attention_layers"):  # numbers of layers
        small["cross_attention_layers"] = [layers - 1]
    if inner := small.get("intermediate_layers_indices"):  # their outputs are concatenated with the last layer's
        small["intermediate_layers_indices"] = [0] * len(inner)
        small["vision_output_dim"] = small["hidden_size"] * (1 + len(inner))
    if "max_num_tiles" in small:  # each tile is as large as an image
        small["image_size"] = 4 * small["patch_size"]
    tokens = {name: value for name, value in small.items() if SPECIAL_TOKEN.fullmatch(name) and is_integer(value)}
    beyond = [name for name, value in tokens.items() if value >= _VOCABULARY]
    for index, name in enumerate(beyond):  # a media token's id has to differ from all others
        small[name] = 0 if name in _TOKENS else _VOCABULARY - 1 - index
    for name, value in small.items():
        if (name.endswith("_config") or name in ("encoder", "decoder")) and isinstance(value, dict):
            small[name] = _shrunk(value, tp)
    return small
