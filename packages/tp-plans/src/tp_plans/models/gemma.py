"""Gemma 3 and 4: four norms a block, norms over each head's queries and keys, and towers in the large ones.

Towers and projectors are replicated.  Image features are written into the token embeddings outside the language model,
which therefore receives full embeddings.  Gemma 4 has layers that share keys and values, per-layer inputs, and experts
next to the MLP in some models.  Its blocks compute with learned scalars and per-layer inputs, so sequence parallelism
gathers the stream at a block's beginning.  Source: the module tree of transformers' ``modeling_gemma4.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tp_plans.models.llama import ATTENTION, GATED_MLP, NORMS
from tp_plans.models.qwen import HEAD_NORM_ATTENTION, HEAD_NORMS
from tp_plans.models.spec import Architecture, DecoderSpec, ExpertsSpec
from tp_plans.plan import Plan
from tp_plans.styles import GatheredParameters

GEMMA3_TEXT = Architecture(
    class_name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    decoder=DecoderSpec(
        sublayers=(HEAD_NORM_ATTENTION, GATED_MLP),
        norms=(*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
)
GEMMA3 = Architecture(
    class_name="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    decoder=replace(GEMMA3_TEXT.decoder, root="model.language_model", merges_embeds_before_root=True),
    notes="vision tower and projector replicated",
)


def _with_padding_row(plan: Plan, config: Any) -> Plan:
    """Models with per-layer inputs index the token embedding for the padding token outside of its forward."""
    text = getattr(config, "text_config", config)
    if not getattr(text, "hidden_size_per_layer_input", 0):
        return plan
    gathered = GatheredParameters(names=("language_model.embed_tokens.weight",))
    return plan.override({"model": gathered, "model.language_model.embed_tokens": None})


GEMMA4_TEXT = Architecture(
    class_name="Gemma4ForCausalLM",
    model_type="gemma4_text",
    decoder=DecoderSpec(
        sublayers=(
            replace(ATTENTION, norms=HEAD_NORMS, optional=("k_proj", "v_proj", "k_norm")),
            GATED_MLP,
            ExpertsSpec(path="experts"),
        ),
        norms=GEMMA3_TEXT.decoder.norms,
        extra_embeddings=("embed_tokens_per_layer",),
        gather_at_block_boundary=True,
        optional=("experts",),
    ),
    notes="per-layer projections replicated",
)
GEMMA4 = Architecture(
    class_name="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    decoder=replace(GEMMA4_TEXT.decoder, root="model.language_model", merges_embeds_before_root=True),
    notes="vision and audio towers and per-layer projections replicated",
    adapt_plan=_with_padding_row,
)
