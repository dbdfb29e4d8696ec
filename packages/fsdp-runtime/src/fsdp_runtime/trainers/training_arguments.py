"""Options of ``TrainingArguments`` that cannot be right on a model that ``parallelize`` has sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_runtime.errors import MeshError, ModelError, OptionError
from fsdp_runtime.mesh.spec import axis_size, require_axes
from fsdp_runtime.steps.checkpointing import recomputes

#: Optimizers that work elementwise, so that a shard is stepped as the full tensor would be.
_OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})
_SAMPLING = frozenset({"random", "sequential"})

#: Where an option is set that is refused, its name, and what to do instead.
_REFUSED: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (lambda args: bool(args.fsdp), "fsdp", "the model is sharded already: parallelize(..., fsdp=FSDPOptions(...))"),
    (lambda args: bool(args.deepspeed), "deepspeed", "the model is sharded already: MeshSpec(dp_shard=...)"),
    (
        lambda args: args.parallelism_config is not None,
        "parallelism_config",
        "the trainer's mesh is the model's: MeshSpec(...)",
    ),
    (lambda args: args.fp16, "fp16", "its gradient scaler does not know of shards: bf16=True"),
    (
        lambda args: args.fp16_full_eval or args.bf16_full_eval,
        "fp16_full_eval and bf16_full_eval",
        "they convert the shards: load the model in that dtype",
    ),
    (lambda args: args.torch_compile, "torch_compile", "parallelize(..., compile=True)"),
    (lambda args: args.use_liger_kernel, "use_liger_kernel", "it replaces layers that are sharded"),
    (
        lambda args: args.auto_find_batch_size,
        "auto_find_batch_size",
        "ranks that run out of memory at different times would part: fsdp-runtime estimate",
    ),
    (lambda args: args.neftune_noise_alpha is not None, "neftune_noise_alpha", "its noise would differ between ranks"),
    (
        lambda args: getattr(args, "enable_jit_checkpoint", False),
        "enable_jit_checkpoint",
        "ranks could save at different steps: fsdp_runtime.monitor.stop_on_signal",
    ),
    (lambda args: args.eval_use_gather_object, "eval_use_gather_object", "gather tensors"),
    (
        lambda args: args.accelerator_config.dispatch_batches is True,
        "accelerator_config's dispatch_batches",
        "every rank reads its own batches: dispatch_batches=False",
    ),
    (lambda args: args.n_gpu > 1, "DataParallel over several GPUs of one process", "start one process a GPU: torchrun"),
)


def check_arguments(args: Any) -> None:
    """Raise :class:`OptionError` for the options of ``TrainingArguments`` that the trainers cannot serve."""
    for is_set, name, instead in _REFUSED:
        if is_set(args):
            raise OptionError(f"{name} cannot be used on a model that parallelize has sharded: {instead}")
    sampling = str(getattr(args, "train_sampling_strategy", "random"))
    if sampling not in _SAMPLING:
        raise OptionError(
            f"train_sampling_strategy={sampling!r} orders samples by the world's ranks, not by those of dp: "
            f"choose one of {', '.join(sorted(_SAMPLING))}"
        )


def check_optimizer(args: Any) -> None:
    """Raise :class:`OptionError` unless the optimizer that the arguments name steps every element alone."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _OPTIMIZERS:
        raise OptionError(
            f"optim={name!r} is not known to be right on shards: choose one of {', '.join(sorted(_OPTIMIZERS))}, or "
            "pass optimizers=(optimizer, None) with one that you built after parallelize"
        )


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise :class:`MeshError` unless every axis larger than 1 is ``dp_replicate``, ``dp_shard`` or ``tp``."""
    require_axes(mesh)
    for axis in mesh.mesh_dim_names or ():
        if axis not in ("dp_replicate", "dp_shard", "tp") and axis_size(mesh, axis) > 1:
            raise MeshError(
                f"the trainers do not shard batches over {axis} (size {axis_size(mesh, axis)}): use dp_replicate, "
                "dp_shard and tp, or a training loop of your own"
            )


def check_model(model: Any, mesh: DeviceMesh, *, recompute: bool) -> None:
    """Raise :class:`ModelError` unless the model is parallelized on ``mesh`` and has its weights.

    Args:
        model: what the user passed.
        mesh: the trainer's mesh.
        recompute: the arguments ask for activation checkpointing too.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model={model!r}: build it, pass it to parallelize and load_weights, and pass it on; the trainer does not "
            "load it by name"
        )
    if on_meta := next((name for name, tensor in model.named_parameters() if tensor.is_meta), None):
        raise ModelError(f"{on_meta} is on the meta device: call load_weights before the trainer")
    submodule = next((path for path, module in model.named_modules() if recomputes(module)), None)
    if recompute and submodule is not None:
        raise OptionError(
            f"{submodule} recomputes its activations by parallelize(activation_checkpointing=...): set "
            "gradient_checkpointing=False in the training arguments"
        )
    sharded = [tensor.device_mesh for tensor in model.parameters() if isinstance(tensor, DTensor)]
    if axis_size(mesh, "tp") > 1 and not sharded:
        raise ModelError("the model has no sharded parameter, and tp > 1: call parallelize(model, mesh) first")
    if axis_size(mesh, "dp_shard") * axis_size(mesh, "dp_replicate") > 1 and not isinstance(model, FSDPModule):
        raise ModelError("the model is not sharded by FSDP2, and dp > 1: call parallelize(model, mesh) first")
    ranks = set(mesh.mesh.flatten().tolist())
    if stray := [own for own in sharded if not set(own.mesh.flatten().tolist()) <= ranks]:
        raise ModelError(f"the model is sharded over {stray[0]}, which is not part of the trainer's mesh {mesh}")
