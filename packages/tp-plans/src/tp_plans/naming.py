"""The names that models give to their layers, by role: the only place of this package that lists them.

A structural reader needs no names.  These lists serve layers of equal shape: queries and keys, a gate and an
up-projection, a norm of each head and one of the residual stream.
"""

from __future__ import annotations

import re

#: The names that a runtime reads too.
__all__ = [
    *("EXPERT_COUNTS", "FUSED_MLPS", "FUSED_QKV", "HEAD_COUNTS", "HEAD_DIM", "KEY", "KV_GROUPS", "MLA_HEADS"),
    *("MLA_QUERIES", "MLA_ROPE_DIM", "MLP_MODULES", "QUERY", "leaf"),
]

# Attention with separate projections.
QUERY, KEY, VALUE = "q_proj", "k_proj", "v_proj"
QKV = (QUERY, KEY, VALUE)
#: Fused query, key and value projections, one matrix after another.
FUSED_QKV = ("qkv_proj", "qkv", "query_key_value")
#: The output projection of an attention layer.
ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense")
#: A gate on the attention output, as wide as the queries.
ATTENTION_GATES = ("gate_proj", "g_proj")
#: Norms of each head's queries, keys or values.
HEAD_NORMS = ("q_norm", "k_norm", "v_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")

# Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).
MLA_KV_DOWN, MLA_KV_UP, MLA_OUTPUT = "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
MLA_QUERIES_DOWN, MLA_QUERIES = "q_a_proj", ("q_b_proj", "q_proj")
#: Norms of the latents, which every rank computes in full.
MLA_NORMS = ("q_a_layernorm", "kv_a_layernorm")
#: Everything that a latent attention layer may consist of.
MLA_LAYERS = (MLA_KV_DOWN, MLA_KV_UP, MLA_OUTPUT, MLA_QUERIES_DOWN, *MLA_QUERIES, *MLA_NORMS)
#: The attributes that a latent attention layer has: the number of heads, and features of the shared rotary key.
MLA_HEADS, MLA_ROPE_DIM = "num_heads", "qk_rope_head_dim"

# MLPs: (input projections..., output projection).
GATED_MLPS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
FUSED_MLPS = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))
PLAIN_MLPS = (("fc1", "fc2"), ("up_proj", "down_proj"), ("c_fc", "c_proj"))
MLPS = (*GATED_MLPS, *FUSED_MLPS, *PLAIN_MLPS)
#: The MLP, or mixture of experts, of a block.
MLP_MODULES = ("mlp", "feed_forward", "ffn", "moe", "block_sparse_moe")

# Attributes of attention modules and of their configs.
HEAD_DIM = "head_dim"
HEAD_DIMS = (HEAD_DIM, "head_size", "attention_head_size", "d_head", "d_kv")
HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "num_q_heads")
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
KV_GROUPS = "num_key_value_groups"

#: Attributes of a mixture that count its routed experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")

#: Layers that recurrences such as Mamba never call: their kernels take the layer's weight as an argument.
KERNEL_ARGUMENTS = ("out_proj", "dt_proj")

#: The argument under which a language model takes embeddings in place of token ids.
EMBEDDINGS_ARGUMENT = "inputs_embeds"
#: The arguments under which a language model takes features that it adds between its blocks: a list, and a dict.
FEATURES_BETWEEN_BLOCKS = ("deepstack_visual_embeds", "deepstack_features")

# Names of unknown decoders' layers, as patterns.
OUTPUT_PROJECTION = re.compile(
    r"o|wo|w2|fc2|(o|out|c|down)_?proj|proj|dense(_4h_to_h)?|down|out(put)?(_linear|_layer)?|out_lin|lin2"
)
ATTENTION_MODULE = re.compile(r"attn|attention|self_att|mha")
QUERY_PROJECTION = re.compile(r"q|wq|q_?(proj|lin|linear)|query(_proj)?|to_q")
KV_PROJECTION = re.compile(r"[kv]|w[kv]|[kv]_?(proj|lin|linear)|(key|value)(_proj)?|to_[kv]")
#: A fused projection that keeps each head's query, key and value together, which no split of three blocks fits.
INTERLEAVED_QKV = re.compile(r"query_key_value")
#: A norm of one head, by its name alone.
HEAD_NORM = re.compile(r"(q|k|v|query|key|value)_?(layer)?norm")
#: Attributes that count heads or features, and those that look so and do not.
COUNT = re.compile(r"head|hidden|embed|dim|size|width|^h$|^n_")
NO_COUNT = re.compile(r"(?<!all_)head_(dim|size)|per_head|proj_dim|group|idx|index|rotary|rope")

#: Inner models that cannot shard activations on the sequence between blocks, with the reason.
NO_SEQUENCE_PARALLELISM: dict[str, str] = {
    "EvollaModel": "its blocks attend to features of a protein encoder, which is part of the decoder",
    "Gemma3nTextModel": "its blocks pass on several streams, stacked before the batch",
    "HrmTextModel": "its blocks sit in two stacks that run in turns and add learned states to the stream",
    "Inkling2LoopTextModel": "its blocks read the outputs of all blocks before, collected outside of them",
    "Inkling2TextModel": "its blocks read the outputs of all blocks before, collected outside of them",
}

#: Classes with identity experts: an index at or above the number of experts returns the input.
EXPERTS_WITH_IDENTITIES = ("LongcatFlashExperts",)


def leaf(path: str) -> str:
    """Return the last part of a dotted path: a module's or parameter's own name."""
    return path.rpartition(".")[2]
