"""What a user does to a model before ``parallelize``, the same to that of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import peft
import torch
from torch import nn

from harness.adapters import filled

Change = Callable[[Any], nn.Module]


def _lora(**options: Any) -> Change:
    def change(model: Any) -> nn.Module:
        torch.manual_seed(7)
        config = peft.LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": "all-linear", **options})
        return filled(peft.get_peft_model(model, config, autocast_adapter_dtype=False))

    return change


def _frozen_embedding(model: Any) -> nn.Module:
    model.get_input_embeddings().requires_grad_(False)
    return model  # type: ignore[no-any-return]


def _eager(model: Any) -> nn.Module:
    model.set_attn_implementation("eager")
    return model  # type: ignore[no-any-return]


def _scaled_gradient(model: Any) -> nn.Module:
    """Register a hook of a user on a parameter."""
    parameter = next(each for name, each in model.named_parameters() if "norm" in name and each.requires_grad)
    parameter.register_hook(_doubled)
    return model  # type: ignore[no-any-return]


def _doubled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


CHANGES: Mapping[str, Change] = {
    "LoRA": _lora(),
    "DoRA": _lora(use_dora=True),
    "LoRA with biases": _lora(bias="lora_only"),
    "LoRA and the last norm": _lora(modules_to_save=["norm"]),
    "frozen embedding": _frozen_embedding,
    "eager attention": _eager,
    "hook of a parameter": _scaled_gradient,
}
