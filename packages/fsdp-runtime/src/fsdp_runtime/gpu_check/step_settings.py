"""Training steps of one rank: run on a device, and estimated by the dry run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime import FSDP2, MeshSpec, forward_with_lm_head, parallelize
from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.gpu_check.machine import optional

#: Fields of the models' configs; a model with experts has the others too.
SIZES: dict[str, Any] = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 64_000}
SIZES |= {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128, "use_cache": False}
EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}


@dataclass(frozen=True)
class StepSetting:
    """A step of forward, loss, backward and AdamW in bfloat16."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # keywords of ``parallelize``
    tokens: tuple[int, int] = (2, 2048)  # rows, and tokens of a row
    experts: bool = False  # a mixture in every block
    tied: bool = False  # one weight for embedding and head
    lora: bool = False  # adapters of rank 16 on all linear layers; the rest is frozen
    linear: bool = False  # log-probabilities of hidden states, without logits
    fused: bool = True  # AdamW(fused=True), else torch's default

    def build(self, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """Return the model on the current device."""
        from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

        sizes = {**SIZES, "tie_word_embeddings": self.tied}
        config: Any = Qwen3MoeConfig(**sizes, **EXPERTS) if self.experts else Qwen3Config(**sizes)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        if self.lora:
            from peft import LoraConfig, get_peft_model

            adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
        return model

    def estimate(self) -> Estimate:
        """Return the dry run's estimate; it needs a process without a process group."""
        (rows, length), loss = self.tokens, "linear" if self.linear else "logits"
        step: dict[str, Any] = {"optimizer": "adamw_fused" if self.fused else "adamw", "logprobs": loss, "clip": False}
        return estimate(self.build, {"dp_shard": 1}, seq_len=length, micro_batch=rows, **step, **self.options)

    def step_on(self, device: torch.device) -> Callable[[], None]:
        """Return a function that takes one step on a device; the process group has one rank."""
        with device:
            model = self.build(torch.float32 if "fsdp" in self.options else torch.bfloat16)
        model = parallelize(model, MeshSpec(dp_shard=1).build(device_type=device.type), **self.options)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=self.fused or None)
        tokens = torch.randint(0, SIZES["vocab_size"], self.tokens, device=device)

        def step() -> None:
            self._loss(model, tokens).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _loss(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        rl_logprobs = optional("rl_logprobs")

        def score(hidden: torch.Tensor, head: Any) -> Any:
            return rl_logprobs.linear_token_logprobs(hidden, head.weight, tokens, shift=True)

        if self.linear:
            logprobs: torch.Tensor = forward_with_lm_head(model, score, input_ids=tokens)
        else:
            logprobs = rl_logprobs.token_logprobs(model(input_ids=tokens).logits, tokens, shift=True)
        return -logprobs.mean()


_MASTERS = FSDP2(mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), master_dtype=torch.float32)
_BLOCKS = {"activation_checkpointing": "block"}
SETTINGS = (
    StepSetting("dense"),
    StepSetting("dense, foreach AdamW", fused=False),
    StepSetting("tied embeddings", tied=True),
    StepSetting("mixture", experts=True),
    StepSetting("blocks recomputed", _BLOCKS),
    StepSetting("MLPs recomputed", {"activation_checkpointing": "mlp"}),
    StepSetting("selective recomputation", {"activation_checkpointing": "selective"}),
    StepSetting("compiled", {"compile": True}),
    StepSetting("float32 masters", {"fsdp": _MASTERS}),
    StepSetting("LoRA", _BLOCKS, lora=True),
    StepSetting("from hidden states", tied=True, linear=True),
    StepSetting("one long row", _BLOCKS, tokens=(1, 32_768), linear=True),
)
