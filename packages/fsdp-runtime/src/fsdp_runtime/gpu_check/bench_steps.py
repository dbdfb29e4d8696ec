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
class Step:
    """A model's config, the rows of a batch, and options of ``parallelize``; AdamW is fused."""

    name: str
    config: dict[str, Any]
    batch: int
    length: int
    options: dict[str, Any] = field(default_factory=dict)
    documents: int = 1  # of each row; plain transformers gets a batch of them


_QWEN = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "num_hidden_layers": 28}
_SMALL = {**_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "tie_word_embeddings": True}
_LARGE = {**_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "tie_word_embeddings": True}
STEPS = (
    Step("Qwen3-0.6B, 2 x 4096", _SMALL, 2, 4096),
    Step("Qwen3-0.6B, 2 x 4096, compiled", _SMALL, 2, 4096, {"compile": True}),
    Step("Qwen3-0.6B, 2 x 8 documents of 512", _SMALL, 2, 4096, {"packed_sequences": True}, 8),
    Step("Qwen3-1.7B, 2 x 4096, blocks recomputed", _LARGE, 2, 4096, {"activation_checkpointing": "block"}),
)
_TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_hidden_layers": 1}
#: A CPU tries the logic.
SMALL_STEPS = (
    Step("tiny", {**_TINY, "num_attention_heads": 4, "num_key_value_heads": 4}, 2, 16, {"packed_sequences": True}, 2),
)


def step_call(case: Step, ours: bool, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that makes one step of a new model with random weights, and returns the loss."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with device:
        model: Any = Qwen3ForCausalLM._from_config(Qwen3Config(**case.config, use_cache=False), dtype=torch.bfloat16)
    ids = torch.randint(0, model.config.vocab_size, (case.batch, case.length), device=device)
    inputs = {"input_ids": ids}
    model.train()
    if ours:
        model = parallelize(model, MeshSpec(dp_shard=1).build(device_type=device.type), **case.options)
        if case.documents > 1:
            inputs["position_ids"] = (
                torch.arange(case.length, device=device) % (case.length // case.documents)
            ).expand_as(ids)
    else:
        inputs["input_ids"] = ids = ids.view(case.batch * case.documents, -1)
        if case.options.get("activation_checkpointing"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.options.get("compile"):
            for layer in model.model.layers:
                layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    score: Any = optional("rl_logprobs")

    def step() -> Tensor:
        logits = model(**inputs).logits
        if ours:
            loss = -score.token_logprobs(logits, ids, shift=True).mean()
        else:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
