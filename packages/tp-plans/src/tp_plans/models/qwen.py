"""Qwen 2 and 3: Llama's names; Qwen 3 adds a norm over each head's queries and keys; 3.5 adds linear attention.

Source: the module trees of transformers' ``modeling_qwen2.py``, ``modeling_qwen3.py`` and ``modeling_qwen3_5.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tp_plans.models.llama import ATTENTION, GATED_MLP, NORMS
from tp_plans.models.spec import Architecture, DecoderSpec, ReplicatedSublayer

HEAD_NORMS = ("q_norm", "k_norm")
HEAD_NORM_ATTENTION = replace(ATTENTION, norms=HEAD_NORMS)
_LINEAR_ATTENTION = ReplicatedSublayer(
    path="linear_attn", linears=("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
)

QWEN2 = Architecture(
    class_name="Qwen2ForCausalLM",
    model_type="qwen2",
    decoder=DecoderSpec(sublayers=(ATTENTION, GATED_MLP), norms=NORMS),
)
QWEN3 = Architecture(
    class_name="Qwen3ForCausalLM",
    model_type="qwen3",
    decoder=DecoderSpec(sublayers=(HEAD_NORM_ATTENTION, GATED_MLP), norms=NORMS),
)
QWEN3_5_TEXT = Architecture(
    class_name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    decoder=DecoderSpec(
        sublayers=(HEAD_NORM_ATTENTION, _LINEAR_ATTENTION, GATED_MLP),
        norms=NORMS,
        optional=("self_attn", "linear_attn"),
    ),
    notes="linear attention computes the same on every rank; its projections are stored split",
)
QWEN3_5 = Architecture(
    class_name="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    decoder=replace(QWEN3_5_TEXT.decoder, root="model.language_model", merges_embeds_before_root=True),
    notes=f"{QWEN3_5_TEXT.notes}; vision tower replicated",
)
