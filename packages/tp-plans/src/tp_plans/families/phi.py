"""Phi-2, whose attention and MLP run side by side after one norm, and Phi-3, whose projections are fused.

Source: the module trees of transformers' ``modeling_phi.py`` and ``modeling_phi3.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tp_plans.decoder import Decoder, Fused, Mixer
from tp_plans.families.entry import Architecture
from tp_plans.families.llama import ATTENTION, NORMS

_HEAD_NORMS = ("q_layernorm", "k_layernorm")  # only where the config has qk_layernorm

PHI = Architecture(
    class_name="PhiForCausalLM",
    model_type="phi",
    decoder=Decoder(
        mixers=(
            replace(ATTENTION, row="dense", norms=_HEAD_NORMS, optional=_HEAD_NORMS),
            Mixer(path="mlp", columns=("fc1",), row="fc2"),
        ),
        norms=("input_layernorm",),
        final_norm="final_layernorm",
    ),
)
PHI3 = Architecture(
    class_name="Phi3ForCausalLM",
    model_type="phi3",
    decoder=Decoder(
        mixers=(
            replace(
                ATTENTION,
                columns=(
                    Fused(
                        name="qkv_proj",
                        pieces=(
                            "config.num_attention_heads",
                            "config.num_key_value_heads",
                            "config.num_key_value_heads",
                        ),
                    ),
                ),
                shared=("qkv_proj",),
                counts=("config.num_attention_heads", "num_key_value_heads"),
            ),
            Mixer(path="mlp", columns=(Fused(name="gate_up_proj", pieces=(1, 1)),), row="down_proj"),
        ),
        norms=NORMS,
    ),
    notes="fused projections: each rank fetches its part of every piece in forward, 1 / tp of the weight",
)
