"""Training steps of one rank: run on a device, timed beside plain transformers, and estimated by the dry run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime import FSDP2, MeshSpec, forward_with_lm_head, parallelize
from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.dry_run.step import ON_HOST, OPTIMIZERS
from fsdp_runtime.gpu_check.machine import optional
from fsdp_runtime.optim import CPUOffloadAdamW
from fsdp_runtime.steps import ActivationCheckpointing, Quantized

#: Fields of the models' configs; a model with experts has the others too.
SIZES: dict[str, Any] = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 64_000}
SIZES |= {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False}
EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}


@dataclass(frozen=True)
class StepSetting:
    """A step of forward, loss, backward and optimizer in bfloat16."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # keywords of ``parallelize``
    tokens: tuple[int, int] = (2, 2048)  # rows, and tokens of a row
    sizes: Mapping[str, Any] = field(default_factory=dict)  # fields of the config that differ from ``SIZES``
    experts: bool = False  # a mixture in every block
    lora: bool = False  # adapters of rank 16 on all linear layers; the rest is frozen
    linear: bool = False  # log-probabilities of hidden states, without logits
    optimizer: str = "adamw_fused"  # a name of ``estimate``
    documents: int = 1  # of each row; plain transformers gets a batch of them
    without: str = ""  # the setting without this one's lever, which takes more memory

    def build(self, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """Return the model on the current device."""
        from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

        sizes = {**SIZES, "use_cache": False, **self.sizes}
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
        step: dict[str, Any] = {"optimizer": self.optimizer, "logprobs": loss, "clip": False}
        return estimate(self.build, {"dp_shard": 1}, seq_len=length, micro_batch=rows, **step, **self.options)

    def step_on(self, device: torch.device, *, plain: bool = False) -> Callable[[], Tensor]:
        """Return a function that takes one step of a new model and returns the loss.

        The process has one rank.  ``plain`` is the step of transformers' own code.
        """
        torch.manual_seed(0)
        with device:
            model: Any = self.build(torch.float32 if "fsdp" in self.options else torch.bfloat16)
        tokens = torch.randint(0, model.config.vocab_size, self.tokens, device=device)
        if plain:
            self._prepare_plain(model)
            tokens = tokens.view(self.tokens[0] * self.documents, -1)
        else:
            model = parallelize(model, MeshSpec(dp_shard=1).build(device_type=device.type), **self.options)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        make, _ = OPTIMIZERS[self.optimizer]
        optimizer: Any = CPUOffloadAdamW(trained, lr=1e-5) if self.optimizer in ON_HOST else make and make(trained)
        loss_of = _plain_loss if plain else self._loss

        def step() -> Tensor:
            loss = loss_of(model, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def _prepare_plain(self, model: Any) -> None:
        if "activation_checkpointing" in self.options:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.layers if "compile" in self.options else ():
            layer.compile()

    def _loss(self, model: Any, tokens: Tensor) -> Tensor:
        rl_logprobs: Any = optional("rl_logprobs")
        inputs = {"input_ids": tokens}
        if self.documents > 1:
            positions = torch.arange(self.tokens[1], device=tokens.device) % (self.tokens[1] // self.documents)
            inputs["position_ids"] = positions.expand_as(tokens)

        def score(hidden: Tensor, head: Any) -> Any:
            return rl_logprobs.linear_token_logprobs(hidden, head.weight, tokens, shift=True)

        if self.linear:
            logprobs: Tensor = forward_with_lm_head(model, score, **inputs)
        else:
            logprobs = rl_logprobs.token_logprobs(model(**inputs).logits, tokens, shift=True)
        return -logprobs.mean()


def _plain_loss(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


_MASTERS = FSDP2(mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), master_dtype=torch.float32)
_BLOCKS = {"activation_checkpointing": "block"}
_TIED = {"tie_word_embeddings": True}
_LONG = (1, 32_768)


def _on_host(mode: Any) -> dict[str, Any]:
    return {"activation_checkpointing": ActivationCheckpointing(mode, offload=True)}


def _quantized(scheme: Any) -> dict[str, Any]:
    return {**_BLOCKS, "steps": (Quantized(scheme),)}


SETTINGS = (
    StepSetting("dense"),
    StepSetting("dense, foreach AdamW", optimizer="adamw"),
    StepSetting("tied embeddings", sizes=_TIED),
    StepSetting("mixture", experts=True),
    StepSetting("blocks recomputed", _BLOCKS),
    StepSetting("MLPs recomputed", {"activation_checkpointing": "mlp"}),
    StepSetting("selective recomputation", {"activation_checkpointing": "selective"}),
    StepSetting("compiled", {"compile": True}),
    StepSetting("float32 masters", {"fsdp": _MASTERS}),
    StepSetting("LoRA", _BLOCKS, lora=True),
    StepSetting("from hidden states", sizes=_TIED, linear=True),
    StepSetting("one long row", _BLOCKS, _LONG, linear=True),
    StepSetting("one long row, LoRA", _BLOCKS, _LONG, linear=True, lora=True),
    StepSetting("activations on the host", _on_host("none"), without="dense"),
    StepSetting("selective, on the host", _on_host("selective"), without="selective recomputation"),
    StepSetting(
        "inputs of blocks on the host", _on_host("block"), _LONG, linear=True, lora=True, without="one long row, LoRA"
    ),
    StepSetting("AdamW on the host", _BLOCKS, optimizer="adamw_cpu_offload", without="blocks recomputed"),
    StepSetting("8-bit states", _BLOCKS, optimizer="adamw_8bit", without="blocks recomputed"),
    StepSetting("bfloat16 states", {"fsdp": _MASTERS}, optimizer="adamw_bf16", without="float32 masters"),
    *(
        StepSetting(f"LoRA on {scheme}", _quantized(scheme), lora=True, without="LoRA")
        for scheme in ("nf4", "int4", "mxfp4", "int8", "fp8")
    ),
)

_QWEN = {"vocab_size": 151_936, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28}
_SMALL = {**_QWEN, **_TIED, "hidden_size": 1024, "intermediate_size": 3072}
_MIDDLE = {**_QWEN, **_TIED, "hidden_size": 2048, "intermediate_size": 6144}
_LARGE = {**_QWEN, "num_attention_heads": 32, "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12_288}
_ROWS = (2, 4096)
#: Steps of ``--bench``, beside plain transformers.
BENCH = (
    StepSetting("Qwen3-0.6B, 2 x 4096", {}, _ROWS, _SMALL),
    StepSetting("Qwen3-0.6B, 2 x 4096, compiled", {"compile": True}, _ROWS, _SMALL),
    StepSetting("Qwen3-0.6B, 2 x 8 documents of 512", {"packed_sequences": True}, _ROWS, _SMALL, documents=8),
    StepSetting("Qwen3-1.7B, 2 x 4096, blocks recomputed", _BLOCKS, _ROWS, _MIDDLE),
    StepSetting("Qwen3-8B, 2 x 4096, LoRA 16 on nf4", _quantized("nf4"), _ROWS, _LARGE, lora=True, linear=True),
)
_TINY = {**_QWEN, "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
#: A CPU tries the logic.
TINY_BENCH = (
    StepSetting("tiny", {"packed_sequences": True}, (2, 16), _TINY, documents=2),
    StepSetting("tiny, recomputed", _BLOCKS, (2, 16), _TINY),
    StepSetting("tiny, LoRA on nf4", _quantized("nf4"), (2, 16), _TINY, lora=True, linear=True),
)
