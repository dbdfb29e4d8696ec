"""Read and replace the attention implementation of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import Tensor, nn


def attention_in_force(config: Any) -> str | None:
    """Return the attention implementation of a config; only its setter is public (``set_attn_implementation``)."""
    return cast("str | None", config._attn_implementation)


def needs_eager_or_flex(model: Any, config: Any) -> bool:
    """Return True if flex attention computes a model's scores, and torch's function does not; by private flags."""
    by_torch = getattr(model, "_supports_sdpa", False) and getattr(config, "attn_logit_softcapping", None) is None
    return bool(getattr(model, "_supports_flex_attn", False)) and not by_torch


def use_attention(
    model: Any, name: str, attend: Callable[..., Any], mask: Callable[..., Any], *, keep: Iterable[nn.Module] = ()
) -> None:
    """Replace attention and its masks in the text part of a model, through transformers' public interfaces."""
    # The model gets a copy of its config first: another model built from the same config keeps its attention. The
    # modules of ``keep`` keep their config, and with it their attention; they get the new masks.
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    unchanged = set(keep)
    for module in model.modules():
        if module not in unchanged and id(config := getattr(module, "config", None)) in copies:
            module.config = copies[id(config)]
    text = model.config.get_text_config()
    key = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is text), None)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name if key is None else {key: name})
    if attention_in_force(text) != name:
        # A model without AttentionInterface in its attention builds its masks through AttentionMaskInterface, by
        # the name in its config, but set_attn_implementation only logs a warning and does not change the name.
        text._attn_implementation = name


def attend_alone(implementation: Any, *args: Any, **options: Any) -> tuple[Tensor, None]:
    """Compute attention by an implementation's function, or a module's own function, as without a mesh."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if callable(implementation):
        options.pop("is_causal", None)
    else:
        implementation = ALL_ATTENTION_FUNCTIONS[implementation]
    output: Tensor = implementation(*args, **options)[0]
    return output, None


def mask_alone(implementation: str, options: dict[str, Any]) -> Tensor | None:
    """Build the mask of an implementation, as without a mesh."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return cast("Tensor | None", ALL_MASK_ATTENTION_FUNCTIONS[implementation](**options))
