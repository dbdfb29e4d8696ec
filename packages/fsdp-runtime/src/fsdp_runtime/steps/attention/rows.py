"""Attention over packed rows and prefix trees on one rank, in the place of the model's attention function."""

from __future__ import annotations

from typing import Any

from fsdp_runtime._peft_compat import model_of_rows
from fsdp_runtime._transformers_compat.attention import use_attention
from fsdp_runtime._transformers_compat.masks import chunks_count_the_row
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.steps.attention.kernels import decide
from fsdp_runtime.steps.context.attention import ContextAttention
from fsdp_runtime.steps.context.mixers import eager_function, replaced_attention
from fsdp_runtime.steps.documents.isolation import REPLACED, CurrentDocuments


def attention_of_rows(model: Any, setup: Setup, documents: CurrentDocuments) -> ContextAttention | None:
    """Replace a model's attention by kernels on an accelerator, or for right chunks, and return it; collective."""
    mixers, name = setup.facts.token_mixers, setup.facts.attention
    replaced = replaced_attention(mixers, name) if name in ("sdpa", "eager") else ()
    others = [mixer for mixer in mixers if mixer not in replaced]
    kernels = runtime_state(model).attention = decide(setup, replaced, others, "rows")
    needed = kernels.accelerated or chunks_count_the_row(model_of_rows(model).config)
    if not needed or not replaced or (setup.shared_prefixes and (others or "flex" not in kernels.usable)):
        return None
    attention = ContextAttention(None, None, documents=documents, kernels=kernels)
    attention.eager = eager_function if name == "eager" else None
    keep = [module for mixer in others for module in mixer.module.modules()]
    use_attention(model, f"{REPLACED}{name}_{id(attention):x}", attention.attend, attention.mask, keep=keep)
    return attention
