"""The trainer: one policy over all ranks, tensor-parallel and fully sharded, with its optimizer."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from batch import IGNORED, Batch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, PretrainedConfig

import fsdp_runtime
import rl_logprobs
from fsdp_runtime.steps import Float8

STREAM_BUCKET = 64 << 20
"""Bytes that the stream of full weights gathers at once."""


class Trainer:
    """The policy that is being trained. Every method is collective: all ranks call it, in the same order.

    Args:
        config: The Hugging Face configuration of the policy.
        checkpoint: The folder to read weights from.
        mesh: A mesh from ``fsdp_runtime.MeshSpec``.
        dtype: What to compute in. Weights, gradients and optimizer states are float32 whatever it is.
        sequence_parallel: Whether activations between layers are split over the ``tp`` axis.
        activation_checkpointing: Recompute each block in backward instead of keeping its activations.
        float8: The recipe of float8 products in the blocks, if any.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        checkpoint: Path,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        sequence_parallel: bool,
        activation_checkpointing: bool,
        float8: str | None = None,
    ) -> None:
        with fsdp_runtime.meta_device():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        policy = None
        if dtype is not torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        steps = () if float8 is None else (Float8(float8, emulate=mesh.device_type == "cpu"),)
        self.model = fsdp_runtime.parallelize(
            model,
            mesh,
            plan="auto",
            sequence_parallel=sequence_parallel,
            activation_checkpointing="block" if activation_checkpointing else "none",
            fsdp=fsdp_runtime.FSDP2(mp_policy=policy),
            steps=steps,
        )
        fsdp_runtime.load_weights(self.model, checkpoint)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments, as at the start of a new phase of training."""
        # Fused: one operator for all parameters, where dispatching several for each would cost more than they compute.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
        """``[batch, seq]``: the log-prob of each target with gradient, zero where there is none.

        The logits stay sharded on the vocabulary; ``token_logprobs`` never gathers them. Under truncated sampling both
        sides normalise over the ids that the generator kept. A mixture sends each token to the generator's experts.
        """
        routes = batch.routes
        with nullcontext() if routes is None else fsdp_runtime.replay_routes(self.model, routes):
            logits = self.model(batch.tokens, use_cache=False).logits
        return rl_logprobs.token_logprobs(
            logits, batch.targets, temperature=temperature, ignore_index=IGNORED, kept_tokens=batch.kept_tokens
        )

    @torch.no_grad()
    def frozen_logprobs(self, batches: list[Batch], temperature: float = 1.0) -> list[torch.Tensor]:
        """The same without gradient, for several batches with one gathering of the weights."""
        with fsdp_runtime.unsharded(self.model):
            return [self.logprobs(batch, temperature) for batch in batches]

    def step(self, loss: torch.Tensor, lr: float, max_grad_norm: float) -> torch.Tensor:
        """One optimizer step against a loss of which FSDP averages the gradients over the data-parallel ranks.

        Returns:
            The gradient norm before clipping, a scalar.
        """
        self.optimizer.zero_grad()
        loss.backward()
        norm = rl_logprobs.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The full weights by the names of the ``transformers`` model, one after another, on every rank."""
        return fsdp_runtime.stream_weights(self.model, bucket_bytes=STREAM_BUCKET, names="model")

    def save(self, folder: Path) -> None:
        """Write an ordinary Hugging Face checkpoint."""
        fsdp_runtime.save_weights(self.model, folder)
