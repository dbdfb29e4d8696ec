"""Small checkpoints of each class of models, float32, with jittered parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 317  # odd, so that shards of the vocabulary are uneven
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_HYBRID = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def _qwen3(name: str, **more: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _hybrid() -> Any:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**{**SIZES, **_HYBRID}))


def _value() -> Any:
    return transformers.Qwen3ForTokenClassification(transformers.Qwen3Config(**SIZES, num_labels=1))


def _vision() -> Any:
    positions = {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]}
    language = {name: value for name, value in SIZES.items() if name != "head_dim"} | {"rope_scaling": positions}
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 48,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    ids = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
    config = transformers.Qwen2_5_VLConfig(text_config=language, vision_config=tower, **ids)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


_MODELS = {
    "dense": lambda: _qwen3("Qwen3"),
    "mixture": lambda: _qwen3("Qwen3Moe", **_EXPERTS, decoder_sparse_step=1, norm_topk_prob=True),
    "hybrid": _hybrid,
    "value": _value,
    "vision": _vision,
}


def write_adapter(path: str, folder: Path) -> str:
    """Write a trained-looking adapter of a checkpoint and return its path."""
    import peft

    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    model = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder / "adapter")
    return str(folder / "adapter")


def write(kind: str, folder: Path) -> str:
    """Write the checkpoint of one class and return its path."""
    torch.manual_seed(0)
    model = _MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder / kind)
    return str(folder / kind)
