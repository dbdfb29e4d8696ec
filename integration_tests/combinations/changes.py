"""What a user does to a model before ``parallelize``, the same to that of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
import torch.distributed as dist
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


def _drawn_by_rank(model: nn.Module) -> None:
    """Leave the first rank's values as they are, and draw others on all other ranks."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters() if rank else ():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def _saved_by_first(model: Any) -> None:
    """Save the model on the first rank alone, as before a run, which sets entries of its config."""
    if dist.get_rank() == 0:
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)


#: What the ranks do apart before ``parallelize``, and one process does not.
APART: Mapping[str, Callable[[Any], None]] = {"seeds of ranks": _drawn_by_rank, "a rank that saved": _saved_by_first}
CHANGES: Mapping[str, Change] = {
    "LoRA": _lora(),
    "DoRA": _lora(use_dora=True),
    "LoRA with biases": _lora(bias="lora_only"),
    "LoRA and the last norm": _lora(modules_to_save=["norm"]),
    "frozen embedding": _frozen_embedding,
    "eager attention": _eager,
    "hook of a parameter": _scaled_gradient,
}
