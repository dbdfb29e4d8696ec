"""The rule by which any config of transformers becomes one of a tiny model with the same kinds of parts.

A field that the default config has set is replaced by its tiny value; the kinds of layers that the default
config names all stay, once each.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

VOCAB = 131  # divides by neither 2 nor 4
HIDDEN = 64
HEADS = 8

#: The tiny value of every size that configs have in common, whatever they call it.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "model_max_length": 128,
    # attention
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": 16,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    # attention through a low rank
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # an indexer that picks the keys
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
    # dense layers
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "ffn_hidden_size": 96,
    # mixtures of experts
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # a stack of which the middle runs in loops
    "n_input_layers": 1,
    "n_recurrent_layers": 1,
    "n_output_layers": 1,
    # recurrences
    "linear_num_key_heads": 4,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_n_heads": HEADS,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_num_heads": HEADS,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "mamba_chunk_size": 4,
    "chunk_size": 4,
    "block_size": 4,
}

#: Counts of four that are eight in a wide model, so that each of eight ranks has one.  Heads of keys and values stay
#: four, so that ranks share them; what reads each of those heads by itself cannot be shared, and has eight.
_WIDER = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "index_n_heads",
    "indexer_n_heads",
    "linear_num_key_heads",
    "linear_num_heads",
    "o_groups",
    "swa_num_attention_heads",
)

#: Set whether or not the default config has them: padding needs its id, and models name it where they index.
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

#: Lists with one entry a layer, of which every kind is kept.
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")


def tiny_fields(default: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that make a config tiny, given the fields of the default one."""
    fields = {name: size for name, size in SIZES.items() if default.get(name) is not None}
    if default.get("qk_rope_head_dim") is not None:  # keys and values are projected up to every head
        fields |= {"num_key_value_heads": HEADS, "head_dim": SIZES["qk_rope_head_dim"]}
    if "mlp_only_layers" in default:  # one dense layer, the other of experts
        fields["mlp_only_layers"] = [0]
    tokens = {name: token for name, token in _TOKENS.items() if name in default}
    return fields | tokens | _kinds(default)


def _kinds(default: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {name: list(dict.fromkeys(default[name])) for name in _KINDS if default.get(name)}
    layers = max([SIZES["num_hidden_layers"], *map(len, kinds.values())])
    if default.get("n_recurrent_layers"):  # Dory, whose dict lists attention and MLP of each layer
        kinds["layer_types"].remove("mlp")
    fields: dict[str, Any] = {name: list(islice(cycle(values), layers)) for name, values in kinds.items()}
    return fields | {"num_hidden_layers": layers} if "num_hidden_layers" in default else fields


def wider(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a wide model that differ from those of a tiny one."""
    return {name: 8 for name in _WIDER if fields.get(name) == 4}


def more_layers(fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of a tiny config that change with its number of layers."""
    if isinstance(text := fields.get("text_config"), dict):
        return {"text_config": more_layers(text, layers)}
    kinds = {name: list(islice(cycle(fields[name]), layers)) for name in _KINDS if fields.get(name)}
    return {"num_hidden_layers": layers, **kinds}
