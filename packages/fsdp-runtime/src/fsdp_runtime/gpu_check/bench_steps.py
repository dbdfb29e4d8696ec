"""Rows of ``--bench`` for steps of training: ours beside plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.gpu_check.machine import optional


@dataclass(frozen=True)
class StepCase:
    """A model's config, the rows of a batch, and options of ``parallelize``; AdamW is fused."""

    name: str
    config: dict[str, Any]
    batch: int
    length: int
    options: dict[str, Any] = field(default_factory=dict)
    documents: int = 1  # of each row; plain transformers gets a batch of them


_QWEN = {"vocab_size": 151_936, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28}
_SMALL = {**_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "tie_word_embeddings": True}
_LARGE = {**_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "tie_word_embeddings": True}
_TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
STEPS = (
    StepCase("Qwen3-0.6B, 2 x 4096", _SMALL, 2, 4096),
    StepCase("Qwen3-0.6B, 2 x 4096, compiled", _SMALL, 2, 4096, {"compile": True}),
    StepCase("Qwen3-0.6B, 2 x 8 documents of 512", _SMALL, 2, 4096, {"packed_sequences": True}, 8),
    StepCase("Qwen3-1.7B, 2 x 4096, blocks recomputed", _LARGE, 2, 4096, {"activation_checkpointing": "block"}),
)
#: A CPU tries the logic.
SMALL_STEPS = (
    StepCase("tiny", {**_QWEN, **_TINY}, 2, 16, {"packed_sequences": True}, 2),
    StepCase("tiny, recomputed", {**_QWEN, **_TINY}, 2, 16, {"activation_checkpointing": "block"}),
)


def step_call(case: StepCase, name: str, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that makes one step of a new model with random weights, and returns the loss.

    The name is ``"ours"`` or ``"transformers"``.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**case.config, head_dim=128, use_cache=False)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()  # type: ignore[no-untyped-call]
    ids = torch.randint(0, config.vocab_size, (case.batch, case.length), device=device)
    inputs = {"input_ids": ids}
    score: Any = optional("rl_logprobs")
    if name == "ours":
        model = parallelize(model, MeshSpec(dp_shard=1).build(device_type=device.type), **case.options)
        if case.documents > 1:
            positions = torch.arange(case.length, device=device) % (case.length // case.documents)
            inputs["position_ids"] = positions.expand_as(ids)
    else:
        inputs["input_ids"] = ids = ids.view(case.batch * case.documents, -1)
        if "activation_checkpointing" in case.options:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.layers if "compile" in case.options else ():
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> Tensor:
        logits = model(**inputs).logits
        if name == "ours":
            loss: Tensor = -score.token_logprobs(logits, ids, shift=True).mean()
        else:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
