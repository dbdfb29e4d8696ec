"""The function that users call; what it runs is imported when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_runtime.estimate.types import Estimate
    from fsdp_runtime.mesh.spec import MeshSpec
    from fsdp_runtime.parallel.activation_checkpoint import ActivationCheckpointing
    from tp_plans import Plan, Style


def estimate(
    model: str | Path | Any,
    mesh: MeshSpec | Mapping[str, int],
    *,
    seq_len: int,
    micro_batch: int = 1,
    plan: Plan | Mapping[str, Style | str] | str | None = "auto",
    sequence_parallel: bool = False,
    activation_checkpointing: ActivationCheckpointing = "none",
    dtype: str = "bf16",
    master_dtype: str | None = None,
    optimizer: str = "adamw",
    logprobs: str | Callable[..., Any] = "logits",
    clip: bool = True,
    offload: bool = False,
    exact: bool = False,
    rank: int = 0,
    device_memory: int | str | None = None,
    bandwidth: Mapping[str, float | str] | float | str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Estimate:
    """Run one training step of a model on fake tensors, as one rank of a mesh that is not there.

    ``parallelize``, forward, loss, backward, gradient clipping and the optimizer step are the real ones; tensors have
    shapes and no storage, and a fake process group (``torch.distributed``'s own, for tests) answers every collective
    at once.  Where blocks are identical only a few run, twice, with one period of blocks more the second time, and
    what that adds is added for every other block; ``exact=True`` runs them all.

    Args:
        model: a ``config.json``, a directory with one, a Hugging Face config, or a function without arguments that
            builds any model (on the meta device).
        mesh: a ``MeshSpec``, or its axes as ``{"dp_shard": 128, "tp": 8}``, every size given.
        seq_len: tokens a sequence.
        micro_batch: sequences that each data-parallel rank takes.
        plan: as for ``parallelize``.
        sequence_parallel: as for ``parallelize``.
        activation_checkpointing: as for ``parallelize``.
        dtype: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"fp64"``: what is computed in, and without ``master_dtype`` also
            the dtype of parameters, gradients and optimizer state.
        master_dtype: as ``"fp32"``: parameters, gradients and optimizer state are kept in it, FSDP2 gathers
            parameters in ``dtype`` and reduces gradients in ``master_dtype`` (the usual mixed precision).
        optimizer: ``"adamw"``, ``"sgd"`` (with momentum) or ``"none"``; torch's, ``foreach`` as on an accelerator.
        logprobs: the loss, the mean of token log-probabilities: ``"logits"`` by ``rl_logprobs.token_logprobs``,
            ``"linear"`` by ``rl_logprobs.linear_token_logprobs`` on hidden states, or a function (or its dotted path)
            that is called as ``function(model, inputs)`` and returns the loss (all of it counts as forward).
        clip: clip the norm of gradients by ``rl_logprobs.clip_grad_norm_`` where that package is installed.
        offload: FSDP2 keeps shards, gradients and optimizer state on the host.
        exact: trace every block.
        rank: whose numbers are wanted; rank 0 holds the largest shards.
        device_memory: bytes of a device, or ``"80GiB"``: then the result tells whether it fits.
        bandwidth: bytes a second that a rank can send over an axis, as ``{"tp": "450GB/s", "dp_shard": 5e10}``; or
            one number for all.
        progress: is called with a step's name, the steps done and all steps.

    Returns:
        Bytes, collectives and floating-point operations of that rank.

    Raises:
        EstimateError: ``torch.distributed`` is running in this process already, the config's class is not known (remote
            code), a package is missing, or a value is not understood.
        MeshError: the mesh has an axis of another name.
        tp_plans.TpPlansError: no plan is known, or the model cannot be split so.
        ModelError, OptionError: as ``parallelize`` raises them.
    """
    from fsdp_runtime.estimate.parse_args import bandwidths, dtype_named, mesh_spec
    from fsdp_runtime.estimate.pipeline import run
    from fsdp_runtime.estimate.report.format import parse_bytes
    from fsdp_runtime.estimate.step import Step

    step = Step(
        seq_len=seq_len,
        micro_batch=micro_batch,
        dtype=dtype_named(dtype),
        master_dtype=None if master_dtype is None else dtype_named(master_dtype),
        optimizer=optimizer,
        logprobs=logprobs,
        clip=clip,
        offload=offload,
        parallelize={
            "plan": plan,
            "sequence_parallel": sequence_parallel,
            "activation_checkpointing": activation_checkpointing,
        },
    )
    return run(
        model,
        mesh_spec(mesh),
        step,
        exact=exact,
        rank=rank,
        device_memory=None if device_memory is None else parse_bytes(device_memory),
        bandwidths=bandwidths(bandwidth),
        progress=progress,
    )
