"""The engine's config as verl's dataclasses: axes of ``MeshSpec`` and options of the steps, by their own names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist

from fsdp_runtime.errors import OptionError
from fsdp_runtime.mesh import MeshSpec
from fsdp_runtime.steps import Pipeline
from fsdp_runtime.trainers.verl import verl_api
from fsdp_runtime.trainers.verl.flags import refuse, require_types

STRATEGY = "fsdp_runtime"
#: Fields of verl's other engines, and the fields with the same meaning here.
ELSEWHERE = {
    "fsdp_config": "fsdp_runtime",
    "tensor_model_parallel_size": "tp",
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
    "ulysses_parallel_size": "cp, with context_parallel=ulysses",
    "expert_model_parallel_size": "ep",
    "pipeline_model_parallel_size": "pp",
    "pipeline_parallel_size": "pp",
    "expert_parallel_size": "ep",
    "data_parallel_replicate_size": "dp_replicate",
    "data_parallel_shard_size": "dp_shard",
    "data_parallel_size": "dp_replicate and dp_shard",
    "activation_checkpoint": "activation_checkpointing",
    "attn_type": "model.override_config.attn_implementation",
}


@dataclass
class FsdpRuntimeEngineConfig(verl_api.FSDPEngineConfig):
    """``engine=fsdp_runtime`` in SFT; ``fsdp_runtime`` of actor, reference and critic in PPO."""

    # ``FLAGS`` has the meaning of the inherited fields.
    _mutable_fields = verl_api.FSDPEngineConfig._mutable_fields | {"freeze_vision_tower", "pad_to_length"}

    strategy: str = STRATEGY
    dp_replicate: int = 1  # all axes as in ``fsdp_runtime.MeshSpec``; one axis may be -1
    dp_shard: int = -1  # ranks that parameters are sharded over
    cp: int = 1  # ranks that a sequence is sharded over
    tp: int = 1  # ranks that layers are sharded over
    ep: int = 1  # ranks that experts are divided over
    pp: int = 1  # ranks that blocks are divided over, in stages
    pp_schedule: str = "1F1B"  # as in ``fsdp_runtime.steps.Pipeline``; a batch has any number of micro-batches
    plan: str | None = "auto"  # options down to ``compile`` as in ``fsdp_runtime.parallelize``
    sequence_parallel: bool = False  # shard activations between blocks over ``tp``
    context_parallel: str = "allgather"  # ``allgather``, ``ulysses`` or ``ring``
    load_balancer: str | None = "headtail"  # ``headtail``, or null for contiguous chunks
    exchange: str = "all_to_all"  # how tokens travel to the experts of ``ep``
    # ``none``, ``mlp``, ``block`` or ``selective``; null follows ``model.enable_gradient_checkpointing``: ``block`` or
    # ``none``
    activation_checkpointing: str | None = None
    compile: bool = False  # compile every block
    float8: str | None = None  # recipe of ``fsdp_runtime.steps.Float8``; null for products in the compute dtype
    float8_emulate: bool = False  # multiply in a dtype of the device, to test a recipe
    # dtype of the parameters; null for float32, and for ``param_dtype`` of a model that is not trained
    model_dtype: str | None = None
    param_dtype: str | None = None  # dtype to compute in; null for verl's ``dtype``
    reduce_dtype: str = "fp32"  # dtype of the reduction of gradients
    reshard_last_block: bool = False  # free the last block too; options down to ``frozen_params`` as in ``FSDP2``
    prefetch_forward: int = 0  # blocks gathered ahead in forward
    prefetch_backward: int = 1  # blocks gathered ahead in backward
    frozen_params: str = "layer"  # ``layer``, ``root`` or ``replicate``
    freeze_vision_tower: bool = False  # do not train the vision tower
    sync_dtype: str | None = None  # dtype of weights for the rollout; null for the parameters' dtype
    use_torch_compile: bool = False  # refused: it compiles verl's entropy function; ``compile`` compiles the blocks
    qat: Any = None  # refused

    def __post_init__(self) -> None:
        """Take the strategy of this engine, which the base class refuses."""

    @property
    def axes(self) -> MeshSpec:
        """The mesh, with verl's ``fsdp_size`` and ``ulysses_sequence_parallel_size``; in a world without -1."""
        replicate, shard, cp = self.dp_replicate, self.dp_shard, self.cp
        if self.fsdp_size != -1:
            if (replicate, shard) not in ((1, -1), (-1, self.fsdp_size)):
                raise OptionError(f"fsdp_size={self.fsdp_size} with dp_shard={shard}: give one of the two")
            replicate, shard = -1, self.fsdp_size
        if (ulysses := self.ulysses_sequence_parallel_size) < 1:
            raise OptionError(f"ulysses_sequence_parallel_size={ulysses}: give a positive number of ranks")
        if ulysses > 1:
            if cp not in (1, ulysses) or self.context_parallel not in ("allgather", "ulysses"):
                raise OptionError(
                    f"ulysses_sequence_parallel_size={ulysses} means cp={ulysses} and context_parallel=ulysses, but "
                    f"cp={cp} and context_parallel={self.context_parallel} are given: leave one out"
                )
            cp = ulysses
        spec = MeshSpec(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=self.tp, ep=self.ep, pp=self.pp)
        return spec.resolve(dist.get_world_size()) if dist.is_initialized() else spec

    @property
    def pipeline(self) -> Pipeline | None:
        """The step of pipeline stages, ``None`` without them; each batch has a number of micro-batches."""
        return Pipeline(self.pp_schedule, microbatches=2 * self.pp) if self.pp > 1 else None

    @property
    def compute_dtype(self) -> torch.dtype:
        return to_dtype(
            "param_dtype", (self.mixed_precision or {}).get("param_dtype") or self.param_dtype or self.dtype
        )

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of the reduction of gradients."""
        return to_dtype("reduce_dtype", (self.mixed_precision or {}).get("reduce_dtype") or self.reduce_dtype)

    @property
    def parameter_dtype(self) -> torch.dtype:
        if self.model_dtype is not None:
            return to_dtype("model_dtype", self.model_dtype)
        return self.compute_dtype if self.forward_only else torch.float32


#: Settings that a role copies to the engine and the optimizer.
_JOINED = ("freeze_vision_tower", "pad_to_length", "grad_clip", "ulysses_sequence_parallel_size")


@dataclass
class FsdpRuntimeActorConfig(verl_api.ActorConfig):
    """verl's actor and reference with this engine."""

    strategy: str = STRATEGY
    fsdp_runtime: FsdpRuntimeEngineConfig = field(default_factory=FsdpRuntimeEngineConfig)
    fsdp_config: Any = None
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False
    grad_clip: float | None = None
    ulysses_sequence_parallel_size: int = 1
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    pad_to_length: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse("actor.", "ActorConfig", self)
        require_types("actor.", self, names=_JOINED)
        self.fsdp_runtime.freeze_vision_tower |= self.freeze_vision_tower
        self.fsdp_runtime.pad_to_length |= self.pad_to_length
        _join(self, "fsdp_config")


@dataclass
class FsdpRuntimeCriticConfig(verl_api.CriticConfig):
    """verl's critic with this engine."""

    strategy: str = STRATEGY
    fsdp_runtime: FsdpRuntimeEngineConfig = field(default_factory=FsdpRuntimeEngineConfig)
    fsdp: Any = None
    grad_clip: float | None = None
    ulysses_sequence_parallel_size: int = 1
    forward_micro_batch_size: int | None = None
    forward_micro_batch_size_per_gpu: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse("critic.", "CriticConfig", self)
        require_types("critic.", self, names=_JOINED)
        _join(self, "fsdp")


def _join(role: Any, theirs: str) -> None:
    """Copy settings of verl's commands on the role, or on its verl engine, to this engine and the optimizer."""
    if role.grad_clip is not None:
        role.optim.clip_grad = role.grad_clip
    if (size := role.ulysses_sequence_parallel_size) > 1:
        object.__setattr__(role.fsdp_runtime, "ulysses_sequence_parallel_size", size)
    given = {name: value for name, value in (getattr(role, theirs) or {}).items() if value is not None}
    wanted, default = engine_config(**given), FsdpRuntimeEngineConfig()
    for name in given:
        value, here = getattr(wanted, name), getattr(role.fsdp_runtime, name)
        if here not in (value, getattr(default, name)):
            raise OptionError(f"{theirs}.{name}={value!r} and {STRATEGY}.{name}={here!r}: give one of the two")
        object.__setattr__(role.fsdp_runtime, name, value)
    role.engine = role.fsdp_runtime


def engine_config(**given: Any) -> FsdpRuntimeEngineConfig:
    """Return the config of fields by name; this is the ``_target_`` of the config group."""
    known = {each.name for each in fields(FsdpRuntimeEngineConfig)}
    unknown = [
        f"{name} (here: {ELSEWHERE[name]})" if name in ELSEWHERE else name for name in given if name not in known
    ]
    if unknown:
        raise OptionError(f"engine fsdp_runtime has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return FsdpRuntimeEngineConfig(**given)


def to_dtype(name: str, value: Any) -> torch.dtype:
    """Return the dtype of a verl name."""
    try:
        dtype = verl_api.PrecisionType.to_dtype(value)
    except RuntimeError:
        raise OptionError(f"{name}={value!r} is no dtype: write fp32 or bf16") from None
    if dtype == torch.float16:
        raise OptionError(f"{name}={value!r} needs a scaler of gradients, which this engine does not have: write bf16")
    return dtype


#: Fields of verl's model that are read here.
_OF_MODEL = ("enable_gradient_checkpointing", "use_remove_padding", "trust_remote_code", "lora_rank")


def check_configs(model: Any, engine: Any, optimizer: Any, checkpoint: Any) -> None:
    """Refuse options in the four configs of an engine that the engine does not support."""
    require_own_config(engine)
    check_flags(engine)
    refuse("model.", "HFModelConfig", model)
    require_types("model.", model, kind=verl_api.HFModelConfig, names=_OF_MODEL)
    if optimizer is not None and not engine.forward_only:
        check_optimizer(optimizer)
    if checkpoint is not None:
        check_checkpoint_flags(checkpoint)


def check_flags(config: FsdpRuntimeEngineConfig) -> None:
    """Refuse the flags of verl's FSDP engine without a counterpart, and invalid values of the others."""
    require_types("", config)
    refuse("", "EngineConfig", config)
    refuse("", "FSDPEngineConfig", config)
    refuse("router_replay.", "EngineRouterReplayConfig", config.router_replay)
    if unknown := {*(config.mixed_precision or {})} - {"param_dtype", "reduce_dtype", "buffer_dtype"}:
        raise OptionError(f"mixed_precision has {min(unknown)!r}: write param_dtype and reduce_dtype")
    if config.pp > 1 and config.router_replay.mode != "disabled":
        raise OptionError(
            f"router_replay.mode={config.router_replay.mode!r} reads the routes of all blocks, and pp={config.pp} "
            "divides them: use pp=1, or mode=disabled"
        )
    if config.sync_dtype is not None:
        to_dtype("sync_dtype", config.sync_dtype)
    buffer_dtype = (config.mixed_precision or {}).get("buffer_dtype")
    if buffer_dtype is not None and to_dtype("mixed_precision.buffer_dtype", buffer_dtype) != torch.float32:
        raise OptionError(f"mixed_precision.buffer_dtype={buffer_dtype!r}: buffers keep their dtype; leave it out")
    if config.pad_to_length and config.pad_to_length_bucket < 1:
        raise OptionError(f"pad_to_length_bucket={config.pad_to_length_bucket}: give a positive number of tokens")


def check_optimizer(optim: Any) -> None:
    """Refuse invalid settings of verl's optimizer and schedule."""
    require_types("optim.", optim, or_none="clip_grad")
    if (clip := optim.clip_grad) is not None and not clip > 0:
        raise OptionError(f"optim.clip_grad={clip!r}: give a positive norm, or null to clip nothing")
    ratio, steps = optim.lr_warmup_steps_ratio, optim.total_training_steps
    if not 0 <= ratio <= 1:
        raise OptionError(f"optim.lr_warmup_steps_ratio={ratio!r}: give a part of all steps, from 0 to 1")
    needs = "lr_scheduler_type=cosine" if optim.lr_scheduler_type == "cosine" else ratio and "lr_warmup_steps_ratio"
    if needs and steps < 1:
        raise OptionError(f"optim.total_training_steps={steps}: {needs} needs the number of steps of the run")


_CONTENTS = ("model", "optimizer", "extra", "hf_model")


def require_own_config(config: object) -> None:
    """Check that a config is this engine's."""
    if not isinstance(config, FsdpRuntimeEngineConfig):
        names = ", ".join(f"{theirs} is {ours}" for theirs, ours in ELSEWHERE.items())
        raise OptionError(
            f"the engine's config is a {type(config).__name__}: choose engine=fsdp_runtime (SFT) or "
            f"model_engine=fsdp_runtime (PPO). Its fields have other names: {names}"
        )


def check_checkpoint_flags(config: Any) -> None:
    """Refuse contents of checkpoints that cannot be written."""
    for name in ("save_contents", "load_contents"):
        contents = list(config.get(name, None) or ())
        if unknown := [each for each in contents if each not in _CONTENTS]:
            raise OptionError(f"checkpoint.{name} has {unknown[0]!r}: write some of {', '.join(_CONTENTS)}")
        if {"optimizer", "extra"} & {*contents} and "model" not in contents:
            raise OptionError(f"checkpoint.{name}={contents} has states of training without 'model': add it")
    refuse("checkpoint.", "CheckpointConfig", config)
