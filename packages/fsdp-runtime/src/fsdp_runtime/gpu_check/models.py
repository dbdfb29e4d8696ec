"""Small models of each kind, the same on every rank, their inputs and their loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime.gpu_check.machine import optional
from fsdp_runtime.gpu_check.ranks import NotRun

ROWS, LENGTH, VOCABULARY = 8, 64, 512
#: Tokens of a row on a CPU, where a step in bfloat16 may take ten times as long as one in float32.
LENGTH_ON_CPU = 16
IMAGE_TOKEN, TOKENS_PER_IMAGE, PIXELS = VOCABULARY - 1, 4, 8
_TEXT: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "use_cache": False}
_TEXT |= {"vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 128}
_EXPERTS |= {"norm_topk_prob": True}
_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
_DELTA_NET: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 8}
_DELTA_NET |= {"linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32}


def build(kind: str) -> nn.Module:
    """Return a small model with every parameter off its initial value.

    Kinds are ``"dense"``, ``"mixture"``, ``"routed"`` (experts for two of eight), ``"value head"``, ``"images"``,
    ``"hybrid"`` (a gated delta net and an attention) and ``"LoRA"``.
    """
    transformers: Any = optional("transformers")
    match kind:
        case "mixture" | "routed":
            experts = _EXPERTS | ({"num_experts_per_tok": 2} if kind == "routed" else {})
            model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_TEXT, **experts))
        case "value head":
            model = transformers.Qwen3ForTokenClassification(transformers.Qwen3Config(**_TEXT, num_labels=1))
        case "images":
            tower = {**_TOWER, "image_size": PIXELS, "patch_size": 2}
            images = {"mm_tokens_per_image": TOKENS_PER_IMAGE, "image_token_index": IMAGE_TOKEN}
            config = transformers.Gemma3Config(text_config=_TEXT, vision_config=tower, **images)
            model = transformers.Gemma3ForConditionalGeneration(config)
        case "hybrid":
            model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**_TEXT, **_DELTA_NET))
        case _:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT))
    if kind == "LoRA":
        peft = optional("peft")
        if peft is None:
            raise NotRun("peft is not installed")
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            center = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(center + 0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()  # type: ignore[no-any-return]  # no dropout


def inputs_of(kind: str, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Return keyword arguments of a model's forward for ``ROWS`` rows, and the targets ``[ROWS, length]``."""
    generator = torch.Generator().manual_seed(1)
    length = LENGTH_ON_CPU if device.type == "cpu" else LENGTH
    tokens, targets = (torch.randint(0, IMAGE_TOKEN, (ROWS, length), generator=generator) for _ in range(2))
    inputs = {"input_ids": tokens}
    if kind == "images":
        tokens[:, 1 : 1 + TOKENS_PER_IMAGE] = IMAGE_TOKEN
        inputs["token_type_ids"] = (tokens == IMAGE_TOKEN).long()
        inputs["pixel_values"] = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator).to(dtype)
    return {name: value.to(device) for name, value in inputs.items()}, targets.to(device)


def loss_of(model: nn.Module, inputs: dict[str, Any], targets: Tensor, tokens: int) -> Tensor:
    """Return the loss summed over this rank's tokens, over a number of tokens, in float32.

    It is the cross-entropy, and of a value head the squared error for targets between 0 and 1.
    """
    logits = model(**inputs).logits
    logits = (logits.full_tensor() if isinstance(logits, DTensor) else logits).float()
    if logits.shape[-1] == 1:
        return (logits[..., 0] - targets / VOCABULARY).square().sum() / tokens
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens
