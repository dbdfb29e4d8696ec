"""Tiny but real models: Hugging Face classes with every parameter jittered.

Fresh models have zero biases and one-valued norms, under which a bias added twice or a norm's missing gradient
reduction cannot be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from harness.copies import copier

VOCAB = 131  # does not divide by 2 or 4
IMAGE_TOKEN = 130
HIDDEN = 64

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}
_PATCHES = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
)


def tiny_config(architecture: str, *, tied: bool = False, **changes: Any) -> Any:
    """The config of a tiny model of a Hugging Face class; ``changes`` go to the text model's config."""
    import transformers

    text = {**_TEXT, "tie_word_embeddings": tied, **changes}
    match architecture:
        case "LlamaForCausalLM":
            return transformers.LlamaConfig(**text, attention_bias=True, mlp_bias=True)
        case "Qwen2ForCausalLM":
            text.pop("head_dim")
            return transformers.Qwen2Config(**text)
        case "Qwen3ForCausalLM" | "Qwen3ForSequenceClassification":
            return transformers.Qwen3Config(**text)
        case "Gemma3ForCausalLM":
            return transformers.Gemma3TextConfig(**_gemma(text))
        case "Gemma3ForConditionalGeneration":
            return transformers.Gemma3Config(
                text_config=_gemma(text),
                vision_config=_VISION,
                mm_tokens_per_image=4,
                image_token_index=IMAGE_TOKEN,
                tie_word_embeddings=tied,
            )
        case "Qwen2_5_VLForConditionalGeneration":
            text.pop("head_dim")
            rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
            return transformers.Qwen2_5_VLConfig(
                text_config=text | {"rope_parameters": rope},
                vision_config=_PATCHES,
                image_token_id=IMAGE_TOKEN,
                video_token_id=129,
                vision_start_token_id=128,
                vision_end_token_id=127,
                tie_word_embeddings=tied,
            )
        case "Qwen3MoeForCausalLM":
            return transformers.Qwen3MoeConfig(**{**_MIXTURE, **text})
        case "GptOssForCausalLM":
            return transformers.GptOssConfig(**{**_MIXTURE, "num_local_experts": 8, **text})
    from coverage.shrink import tiny_fields

    config_class = getattr(transformers, architecture).config_class
    return config_class(**{**tiny_fields(config_class().to_dict()), "tie_word_embeddings": tied, **changes})


def tiny_model(architecture: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> nn.Module:
    """A tiny jittered model in evaluation mode, the same on every rank; ``options`` go to :func:`tiny_config`."""
    key = (architecture, dtype, seed, repr(sorted(options.items())))
    return copy_of_one_build(lambda: _built(architecture, dtype, seed, options), key)


def _built(architecture: str, dtype: torch.dtype, seed: int, options: dict[str, Any]) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    model_class: Any = getattr(transformers, architecture)
    experts = options.pop("experts", "eager")
    chooses_experts = getattr(model_class, "_can_set_experts_implementation", lambda: False)()  # not in 4.57
    mixture = {"experts_implementation": experts} if chooses_experts else {}
    model: nn.Module = model_class._from_config(tiny_config(architecture, **options), **mixture)
    model.eval()  # no dropout; gradients flow as in training
    model.to(dtype)
    jitter(model)
    return model


#: What copies the models of the keys that were asked for last, and torch's random state after each was built.
_BUILDS: dict[Hashable, tuple[Callable[[], nn.Module], Tensor]] = {}
_MOST_BUILDS = 32


def copy_of_one_build(build: Callable[[], nn.Module], key: Hashable) -> nn.Module:
    """Return a copy of what ``build`` returns, and leave torch's random state as ``build`` does.

    A copy takes a tenth of the time that a class of transformers needs to initialize its parameters. Under a mode, such
    as a device's or that of fake tensors, the model is built.
    """
    if _get_current_function_mode() is not None or _get_current_dispatch_mode() is not None:
        return build()
    key = (torch.get_default_dtype(), key)
    if (found := _BUILDS.pop(key, None)) is None:
        model = build()
        found = copier(model), torch.get_rng_state()
    copied, state = _BUILDS[key] = found
    if len(_BUILDS) > _MOST_BUILDS:
        del _BUILDS[next(iter(_BUILDS))]
    model = copied()
    torch.set_rng_state(state)
    return model


def jitter(model: nn.Module, scale: float = 0.05) -> None:
    """Move every parameter away from its initial value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)


def tiny_inputs(model: nn.Module, *, batch: int, length: int, seed: int = 1) -> dict[str, Tensor]:
    """Token ids (and images, for a model that takes them) of a batch, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": torch.randint(3, IMAGE_TOKEN, (batch, length), generator=generator)}
    if hasattr(model.config, "vision_config"):
        tokens = model.config.mm_tokens_per_image
        inputs["input_ids"][:, 1 : 1 + tokens] = IMAGE_TOKEN
        inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN).long()
        size = model.config.vision_config.image_size
        dtype = next(model.parameters()).dtype
        inputs["pixel_values"] = torch.randn(batch, 3, size, size, generator=generator).to(dtype)
    return inputs


def _gemma(text: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], **text}
