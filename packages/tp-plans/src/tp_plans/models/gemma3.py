"""Gemma 3: four norms a block, norms over each head's queries and keys, and a vision tower in the large ones.

The vision tower and the projector are replicated; image features are written into the token
embeddings outside the language model, which therefore receives them in full.
"""

from __future__ import annotations

from dataclasses import replace

from tp_plans.models.llama import GATED_MLP, NORMS
from tp_plans.models.qwen import HEAD_NORM_ATTENTION
from tp_plans.models.spec import Architecture, DecoderSpec

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
