"""NeMo Automodel on the plans of this package: its recipes shard every Hugging Face class by ``parallelize``.

Importing this module is enough: ``import fsdp_runtime.trainers.automodel``, before the recipe builds its model.
Automodel's classes with a parallelizer keep it, and so do the strategies DDP and Megatron-FSDP.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from nemo_automodel.components._peft.lora import LinearLoRA
from nemo_automodel.components.distributed.config import FSDP2Config
from nemo_automodel.components.distributed.context_parallel.sharder import (
    ContextParallelSharder,
    ShardLayout,
    round_robin_local_indices,
)
from nemo_automodel.components.distributed.parallelizer import ModelParallelizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import PreTrainedModel

from fsdp_runtime import FSDP2, adopt_mesh, materialize, parallelize, sequence_layout
from fsdp_runtime._peft_compat import base_model
from fsdp_runtime.errors import OptionError
from fsdp_runtime.mesh import axis_size
from fsdp_runtime.optim import Muon
from fsdp_runtime.steps.context.step import padded
from fsdp_runtime.trainers._automodel_compat import (
    allow_expert_parallelism,
    keep_attention_masks,
    keep_expert_gradients,
    set_parallelizer,
)
from tp_plans import TpPlansError, with_expert_parallelism

_RECOMPUTED = {False: "none", None: "none", True: "block", "full": "block", "selective": "selective"}
_FROZEN = {"root": "root", "per_layer": "layer", "replicate": "replicate"}
_REFUSED = {
    "patch_is_packed_sequence": "packed rows would read one another: leave it out",
    "enable_async_tensor_parallel": "it is not covered: leave it out",
    "enable_compile": "Automodel's compile runs after sharding and is not covered: leave it out",
}
#: The method that recipes call for a sharder of batches.
_PREPARES = "prepare_model_inputs_for_cp"


class MeshParallelizer(ModelParallelizer):
    """Automodel's contract of a model's parallelizer, served by ``parallelize``.

    With ``strategy: fsdp2`` the sizes ``tp_size``, ``cp_size``, ``ep_size``, ``dp_replicate_size`` and ``dp_size`` are
    the sizes of the mesh.  Gradients are means over ``dp`` and ``cp``, as Automodel's recipes expect.
    """

    def parallelize(self, model: nn.Module, mesh_context: Any, /) -> nn.Module:
        """Apply every parallelism that Automodel's ``MeshContext`` asks for, in place; return the same model."""
        config, mesh = mesh_context.strategy_config, mesh_context.device_mesh
        if not isinstance(config, FSDP2Config) or mesh is None or mesh.size() == 1:
            return super().parallelize(model, mesh_context)
        options = _options(config, mesh_context)
        for path, module in model.named_modules() if mesh_context.tp_size > 1 else ():
            if isinstance(module, LinearLoRA):
                raise OptionError(f"peft: {path} computes its adapter on whole layers: use distributed.tp_size=1")
        adopted = _adopted(mesh_context)
        divisor = axis_size(adopted, "dp_replicate") * axis_size(adopted, "dp_shard") * axis_size(adopted, "cp")
        fsdp = _fsdp(config, mesh_context, float(divisor))
        if mesh_context.reapply_trainability is not None:
            mesh_context.reapply_trainability(model)
        parallelize(model, adopted, fsdp=fsdp, logits="full", **options)
        keep_expert_gradients(model)
        materialize(model)  # recipes would lose the attributes and hooks of parameters
        if axis_size(adopted, "cp") > 1:
            model.__dict__[_PREPARES] = _Sharder(adopted).prepare
        return model


class RecipeMuon(Muon):
    """:class:`~fsdp_runtime.optim.Muon` as a recipe's ``optimizer._target_``."""

    # ``is_dion_optimizer`` of Automodel 0.7.0 takes any class of the name Muon for dion's.


def _options(config: Any, mesh_context: Any) -> dict[str, Any]:
    """Return the keywords of ``parallelize`` for an ``FSDP2Config``."""
    for name, instead in _REFUSED.items():
        if getattr(config, name):
            raise OptionError(f"distributed.{name}: {instead}")
    if mesh_context.pp_size > 1:
        raise OptionError(f"distributed.pp_size={mesh_context.pp_size}: pipelines are not covered: use 1")
    if (scope := tuple(config.activation_checkpointing_scope)) != ("all",):
        raise OptionError(f"distributed.activation_checkpointing_scope={scope}: blocks are recomputed all, or none")
    if config.multimodal.vision.frame_sharding.enabled:
        raise OptionError(
            "distributed.multimodal.vision.frame_sharding: every rank of cp computes all frames: disable it"
        )
    if mesh_context.cp_ring_degree != 1 or mesh_context.cp_ulysses_degree not in (None, mesh_context.cp_size):
        raise OptionError(
            "cp_ring_degree and cp_ulysses_degree: the ranks of cp exchange keys and values: leave them out"
        )
    moe = mesh_context.moe_parallel_config
    if moe is not None and moe.lm_head_precision is not None:
        raise OptionError("moe.lm_head_precision: load the model in float32 instead")
    if moe is not None and not moe.wrap_outer_model:
        raise OptionError("moe.wrap_outer_model=False: FSDP2 shards the whole model: leave it out")
    if (mode := mesh_context.activation_checkpointing) not in _RECOMPUTED:
        raise OptionError(f"activation_checkpointing={mode!r}: choose one of true, full, selective")
    return {
        "plan": "auto" if config.tp_plan is None else config.tp_plan,
        "sequence_parallel": config.sequence_parallel and mesh_context.tp_size > 1,
        "activation_checkpointing": _RECOMPUTED[mode],
    }


def _fsdp(config: Any, mesh_context: Any, divisor: float) -> FSDP2:
    moe = mesh_context.moe_parallel_config
    prefetch, reshard = config.enable_fsdp2_prefetch, config.reshard_after_forward
    if reshard is None and moe is not None:
        reshard = moe.reshard_after_forward
    return FSDP2(
        mp_policy=config.mp_policy if moe is None or moe.mp_policy is None else moe.mp_policy,
        offload_policy=config.offload_policy if isinstance(config.offload_policy, CPUOffloadPolicy) else None,
        reshard_after_forward=reshard is not False,
        reshard_last_block=reshard is True,
        prefetch_forward=config.fsdp2_forward_prefetch_depth if prefetch else 0,
        prefetch_backward=config.fsdp2_backward_prefetch_depth if prefetch else 1,
        frozen_params=_FROZEN[config.multimodal.frozen_sharding],  # type: ignore[arg-type]
        gradient_divide_factor=divisor,
    )


def _adopted(mesh_context: Any) -> DeviceMesh:
    """Return Automodel's meshes as one mesh of this package, over the same process groups."""
    mesh, experts = mesh_context.device_mesh, mesh_context.moe_mesh
    expert_mesh = None if experts is None or mesh_context.ep_size == 1 else experts["ep_shard", "ep"]
    axes = tuple(axis for axis in mesh.mesh_dim_names if axis != "pp")
    return adopt_mesh(mesh[axes], expert_mesh=expert_mesh, efsdp="ep_shard")


class _Sharder:
    """Give recipes the tokens of this rank of ``cp``; the model's own attention spans the ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def prepare(self, batch: Any, *, num_chunks: int = 1) -> dict[str, Any]:
        """Return the inputs that Automodel's ``ContextParallelSharder`` asks a model for."""
        if num_chunks != 1 or batch.get("qkv_format") == "thd":
            raise OptionError("rows in THD format, or in chunks, on cp: collate [batch, sequence] rows")
        own = ContextParallelSharder(shard_batch=self.shard, local_token_global_indices=round_robin_local_indices)
        return {"cp_sharder": own}

    def shard(
        self, cp_mesh: Any, tp_mesh: Any, batch: dict[str, Any], *, loss_mask: Any = None, padding_token_id: int = 0
    ) -> tuple[Any, dict[str, Any], Any]:
        """Pad every tensor of tokens to a divisible length, and take this rank's tokens."""
        length = next(batch[name] for name in ("input_ids", "inputs_embeds") if name in batch).shape[1]
        multiple = 2 * axis_size(self.mesh, "cp")
        full = -(-length // multiple) * multiple
        layout = sequence_layout(self.mesh, full)
        fills = {"input_ids": padding_token_id, "labels": -100}
        device = next(value.device for value in batch.values() if isinstance(value, Tensor))
        batch.setdefault("position_ids", torch.arange(length, device=device).expand(1, -1))
        for name, value in batch.items():
            if isinstance(value, Tensor):
                dim = value.dim() - 1 if name == "position_ids" else 1
                if value.dim() <= dim or value.shape[dim] != length:
                    raise OptionError(f"{name} {tuple(value.shape)} has no entry for each of {length} tokens on cp")
                counts = name == "position_ids"
                row = _counted_on(value, full) if counts else padded(value, full, fills.get(name, 0))
                batch[name] = layout.shard(row, dim=dim)
        return nullcontext, batch, ShardLayout(original_seq_len=length, padded_seq_len=full)


def _counted_on(positions: Tensor, length: int) -> Tensor:
    """Return ``[..., length]`` positions that go on counting in padding: padding is no separate document."""
    more = torch.arange(1, length - positions.shape[-1] + 1, device=positions.device, dtype=positions.dtype)
    return torch.cat([positions, positions[..., -1:] + more], -1)


def has_experts(model: Any) -> bool:
    """Return True if a model has experts that can be divided over ``ep``."""
    try:
        with_expert_parallelism(None, base_model(model))
    except TpPlansError:
        return False
    return True


PARALLELIZER = MeshParallelizer()
set_parallelizer(PreTrainedModel, PARALLELIZER)
allow_expert_parallelism(PARALLELIZER, has_experts)
keep_attention_masks(lambda model: _PREPARES in model.__dict__)
