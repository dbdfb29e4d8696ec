"""Falcon-H1: attention and a Mamba-2 mixer side by side in every block.

Every rank computes the mixer in full.  Source: the module tree of transformers' ``modeling_falcon_h1.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tp_plans.models.llama import ATTENTION, GATED_MLP
from tp_plans.models.spec import Architecture, DecoderSpec, ReplicatedSublayer

FALCON_H1 = Architecture(
    class_name="FalconH1ForCausalLM",
    model_type="falcon_h1",
    decoder=DecoderSpec(
        sublayers=(
            ATTENTION,
            ReplicatedSublayer(path="mamba", linears=("in_proj",), gathered_params=("out_proj.weight",)),
            replace(GATED_MLP, path="feed_forward"),
        ),
        norms=("input_layernorm", "pre_ff_layernorm"),
        final_norm="final_layernorm",
    ),
    notes="the Mamba mixer computes the same on every rank; its projections are stored split",
)
