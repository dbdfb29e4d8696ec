"""``estimate``; a call imports the modules that it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

if TYPE_CHECKING:
    import torch

    from fsdp_runtime.dry_run.types import Estimate
    from fsdp_runtime.keywords import Options
    from fsdp_runtime.mesh import MeshSpec

    class EstimateOptions(Options, total=False):
        """The keywords of ``parallelize``, and keywords of the training step."""

        micro_batch: int
        micro_batches: int
        dtype: torch.dtype | str
        frozen_dtype: torch.dtype | str | None
        optimizer: str
        logprobs: str | Callable[..., Any]
        clip: bool
        assume_gradients: bool
        routing: Literal["balanced", "worst"]
        offload_activations: bool
        attention_kernels: Literal["flash2", "flash3", "none"]
        allocator: str | None
        constants: Collection[str]


def estimate(
    model: str | Path | Any,
    mesh: MeshSpec | Mapping[str, int],
    *,
    seq_len: int,
    exact: bool = False,
    rank: int = 0,
    device_memory: int | str | None = None,
    bandwidth: Mapping[str, float | str] | float | str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Unpack[EstimateOptions],
) -> Estimate:
    """Run one training step of a model on fake tensors, as one rank of a simulated mesh.

    The step is the real code.  Tensors have shapes and no data, and torch's fake process group answers collectives.
    Of identical blocks only a few run, in two traces that differ by one period of blocks; the difference is added for
    every other block.

    Args:
        model: a ``config.json``, a directory with one, a Hugging Face config, or a function without arguments that
            builds any model (on the meta device).
        mesh: a ``MeshSpec``, or its axes as ``{"dp_shard": 128, "tp": 8}``, every size given.
        seq_len: tokens per sequence.
        exact: trace every block.
        rank: the rank to simulate; rank 0 holds the largest shards.
        device_memory: bytes of a device, or ``"80GiB"``; the result then says whether the peak fits.
        bandwidth: bytes per second that a rank can send over an axis, such as ``{"tp": "450GB/s", "dp_shard": 5e10}``;
            or one number for all axes.
        progress: called with a step's name, the number of finished steps and the number of all steps.
        options: the keywords below, and the keywords of ``parallelize``, such as ``plan`` and ``fsdp``.  Compiled code
            cannot be traced: with ``compile``, an eager trace leaves out the results that a compiler fuses.

    Keyword Args:
        micro_batch: sequences per data-parallel rank; 1 by default.
        micro_batches: forward and backward passes of a step; their gradients add up.
        dtype: dtype of the model, ``torch.bfloat16`` by default, or a word: ``"bf16"``, ``"fp16"``, ``"fp32"``,
            ``"fp64"``.  ``fsdp`` sets other dtypes of parameters, gradients and optimizer state.
        frozen_dtype: dtype of stored parameters without gradients, such as ``torch.float32`` beside LoRA of code that
            loads models in it; ``dtype`` by default.
        optimizer: ``"adamw"`` (default) or ``"sgd"`` (with momentum), torch's with ``foreach`` as on an accelerator;
            ``"adamw_fused"`` and ``"adamw_single"``, without the temporaries of ``foreach``; of ``fsdp_runtime.optim``
            ``"adamw_cpu_offload"``, ``"adamw_8bit"`` and ``"adamw_bf16"``; or ``"none"``.
        logprobs: the loss, the mean of token log-probabilities: ``"logits"`` (default) by
            ``rl_logprobs.token_logprobs``, ``"linear"`` by ``rl_logprobs.linear_token_logprobs`` on hidden states;
            or a function (or its dotted path) that is called as ``function(model, inputs)`` and returns the loss;
            all of it counts as forward.
        clip: clip the gradient norm by ``rl_logprobs.clip_grad_norm_``, if that package is installed; ``True`` by
            default.
        assume_gradients: count gradients and optimizer state of trainable parameters that the step does not reach,
            such as a vision tower's: the step has text and no images.
        routing: on a mesh with ``ep``, the routes of a mixture's tokens: ``"balanced"`` (default), as if its router
            chose any experts equally often; or ``"worst"``, every token of every rank to as many of this rank's
            experts as possible.
        offload_activations: move tensors kept for backward to the host and back, also outside of blocks, as TRL's
            ``OffloadActivations`` does; for blocks give ``ActivationCheckpointing(..., offload=True)``.
        attention_kernels: count the workspaces of these kernels in backward: ``"flash2"`` (default: FlashAttention 2,
            also torch's own), ``"flash3"`` or ``"none"``.
        allocator: options of the CUDA caching allocator as in ``PYTORCH_ALLOC_CONF``, such as
            ``"expandable_segments:True"``; ``None`` models no allocator.
        constants: costs of a process on a GPU that are counted besides tensors: ``"context"``, ``"nccl"`` and
            ``"cublas"``, all by default.

    Returns:
        Bytes, collectives and floating-point operations of that rank.

    Raises:
        EstimateError: ``torch.distributed`` is initialized in this process, the config's class is unknown (remote
            code), a package is missing, or a value is not valid.
        MeshError: the mesh has an unknown axis.
        tp_plans.TpPlansError: no plan is known, or it does not fit the model.
        ModelError: no blocks are found, or no module would recompute.
        OptionError: an option is not allowed, or needs an axis that the mesh lacks.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.dry_run import estimate
        >>> def build():
        ...     blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(2)))
        ...     return nn.Sequential(nn.Embedding(32, 16), blocks)
        >>> def loss(model, inputs):
        ...     return model(inputs["input_ids"]).square().mean()
        >>> found = estimate(build, {"dp_shard": 4}, seq_len=8, plan=None, logprobs=loss, clip=False)
        >>> found.memory.resident.parameters  # bytes of this rank's shards: (32 * 16 + 2 * 16 * 17) / 4 in bf16
        528
    """
    from fsdp_runtime.dry_run import parse_args

    spec, bandwidths = parse_args.parse_mesh_spec(mesh), parse_args.parse_bandwidths(bandwidth)
    memory = None if device_memory is None else parse_args.parse_bytes(device_memory)
    from fsdp_runtime.dry_run.pipeline import run  # torch, after the arguments that need none
    from fsdp_runtime.dry_run.step import StepConfig

    step = StepConfig.parse(options, seq_len=seq_len, exact=exact, rank=rank, device_memory=memory)
    return run(model, spec, step, bandwidths, progress)
