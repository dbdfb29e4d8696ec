"""Phi-2 (attention and MLP side by side after one norm) and Phi-3 (fused projections).

Source: the module trees of transformers' ``modeling_phi.py`` and ``modeling_phi3.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tp_plans.models.llama import ATTENTION, NORMS
from tp_plans.models.spec import Architecture, DecoderSpec, FusedLinear, SublayerSpec

_HEAD_NORMS = ("q_layernorm", "k_layernorm")  # only where the config has qk_layernorm

_QUERY_HEADS, _KV_HEADS = "config.num_attention_heads", "config.num_key_value_heads"
_QKV = FusedLinear(name="qkv_proj", fused_sizes=(_QUERY_HEADS, _KV_HEADS, _KV_HEADS))
_GATE_UP = FusedLinear(name="gate_up_proj", fused_sizes=(1, 1))

_ATTENTION = replace(ATTENTION, rowwise="dense", norms=_HEAD_NORMS, optional=_HEAD_NORMS)
_MLP = SublayerSpec(path="mlp", colwise=("fc1",), rowwise="fc2")
_HEAD_COUNTS = (_QUERY_HEADS, "num_key_value_heads")
_FUSED_ATTENTION = replace(ATTENTION, colwise=(_QKV,), kv_projections=("qkv_proj",), head_count_attrs=_HEAD_COUNTS)
_FUSED_MLP = SublayerSpec(path="mlp", colwise=(_GATE_UP,), rowwise="down_proj")

PHI = Architecture(
    class_name="PhiForCausalLM",
    model_type="phi",
    decoder=DecoderSpec(sublayers=(_ATTENTION, _MLP), norms=("input_layernorm",), final_norm="final_layernorm"),
)
PHI3 = Architecture(
    class_name="Phi3ForCausalLM",
    model_type="phi3",
    decoder=DecoderSpec(sublayers=(_FUSED_ATTENTION, _FUSED_MLP), norms=NORMS),
    notes="fused projections: each rank fetches its part of every piece in forward, 1 / tp of the weight",
)
