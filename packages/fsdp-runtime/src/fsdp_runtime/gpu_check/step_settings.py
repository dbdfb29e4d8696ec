"""Training steps of one rank: run on a device, and estimated by the dry run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime import FSDP2, MeshSpec, forward_with_lm_head, parallelize
from fsdp_runtime.dry_run import Estimate, estimate

#: Sizes of the model, with and without experts.
SIZES: dict[str, Any] = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 64_000}
SIZES |= {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128, "use_cache": False}
EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """A step of forward, loss, backward and AdamW, in bfloat16."""

    name: str
    tied: bool = False  # one weight for embedding and head
    experts: bool = False  # a mixture in every block
    tokens: tuple[int, int] = (2, 2048)  # rows, and tokens of a row
    recomputed: str = "none"  # the mode of activation checkpointing
    compiled: bool = False
    masters: bool = False  # float32 parameters, gradients and moments under FSDP2
    adapters: bool = False  # LoRA of rank 16 on all linear layers; the rest is frozen
    from_hidden: bool = False  # log-probabilities without logits
    fused: bool = True  # AdamW(fused=True), else torch's default

    def build(self, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """Return the model on the current device."""
        from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

        config: Any = Qwen3MoeConfig(**SIZES, **EXPERTS) if self.experts else Qwen3Config(**SIZES)
        config.tie_word_embeddings = self.tied
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        if self.adapters:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora, autocast_adapter_dtype=False)
        built: nn.Module = model
        return built

    def estimate(self) -> Estimate:
        """Return the dry run's estimate; it needs a process without a process group."""
        rows, length = self.tokens
        return estimate(
            self.build,
            {"dp_shard": 1},
            seq_len=length,
            micro_batch=rows,
            clip=False,
            optimizer="adamw_fused" if self.fused else "adamw",
            logprobs="linear" if self.from_hidden else "logits",
            **self._options(),
        )

    def step_on(self, device: torch.device) -> Callable[[], None]:
        """Return a function that takes one step on a device; the process group has one rank."""
        with device:
            model = self.build(torch.float32 if self.masters else torch.bfloat16)
        model = parallelize(model, MeshSpec(dp_shard=1).build(device_type=device.type), **self._options())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=self.fused or None)
        tokens = torch.randint(0, SIZES["vocab_size"], self.tokens, device=device)
        loss = partial(_loss_of_hidden if self.from_hidden else _loss_of_logits, model, tokens)

        def step() -> None:
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"activation_checkpointing": self.recomputed, "compile": self.compiled}
        if self.masters:
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
            options["fsdp"] = FSDP2(mp_policy=policy, master_dtype=torch.float32)
        return options


SETTINGS = (
    StepSetting(name="dense"),
    StepSetting(name="dense, foreach AdamW", fused=False),
    StepSetting(name="tied embeddings", tied=True),
    StepSetting(name="mixture", experts=True),
    StepSetting(name="blocks recomputed", recomputed="block"),
    StepSetting(name="MLPs recomputed", recomputed="mlp"),
    StepSetting(name="selective recomputation", recomputed="selective"),
    StepSetting(name="compiled", compiled=True),
    StepSetting(name="float32 masters", masters=True),
    StepSetting(name="LoRA", adapters=True, recomputed="block"),
    StepSetting(name="from hidden states", from_hidden=True, tied=True),
    StepSetting(name="one long row", tokens=(1, 32_768), recomputed="block", from_hidden=True),
)


def _loss_of_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    from rl_logprobs import token_logprobs

    return -token_logprobs(model(input_ids=tokens).logits, tokens, shift=True).mean()


def _loss_of_hidden(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    from rl_logprobs import linear_token_logprobs

    def score(hidden: torch.Tensor, head: Any) -> torch.Tensor:
        return linear_token_logprobs(hidden, head.weight, tokens, shift=True)

    logprobs: torch.Tensor = forward_with_lm_head(model, score, input_ids=tokens)
    return -logprobs.mean()
