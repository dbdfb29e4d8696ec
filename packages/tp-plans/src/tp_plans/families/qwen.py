"""Qwen 2 and 3: Llama's names; Qwen 3 adds a norm over each head's queries and keys."""

from __future__ import annotations

from dataclasses import replace

from tp_plans.decoder import Decoder
from tp_plans.families.entry import Architecture
from tp_plans.families.llama import ATTENTION, GATED_MLP, NORMS

HEAD_NORMS = ("q_norm", "k_norm")

QWEN2 = Architecture(
    class_name="Qwen2ForCausalLM",
    model_type="qwen2",
    decoder=Decoder(mixers=(ATTENTION, GATED_MLP), norms=NORMS),
)
QWEN3 = Architecture(
    class_name="Qwen3ForCausalLM",
    model_type="qwen3",
    decoder=Decoder(mixers=(replace(ATTENTION, norms=HEAD_NORMS), GATED_MLP), norms=NORMS),
)
