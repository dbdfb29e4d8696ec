"""Build the model of verl's config on the mesh: module, adapter, steps, weights; optimizer and schedule."""

from __future__ import annotations

from copy import copy
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_runtime import FSDP2, init_adapters, load_adapter, load_weights, meta_device, parallelize
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.steps import ContextParallel, ExpertParallel, Float8, Step
from fsdp_runtime.trainers.verl import verl_api
from fsdp_runtime.trainers.verl.config import FsdpRuntimeEngineConfig

#: Attributes under which vision-language models of transformers keep their vision tower.
_VISION_TOWERS = ("visual", "vision_tower", "vision_model")


def build_module(model_config: Any, config: FsdpRuntimeEngineConfig, *, value_head: bool) -> nn.Module:
    """Return the module of a config on the meta device, with the config's adapter."""
    hf_config = model_config.hf_config
    code = {"trust_remote_code": True} if model_config.trust_remote_code else {}
    with meta_device():
        if value_head:
            module = _value_model(hf_config, dtype=config.parameter_dtype, **code)
        else:
            auto = verl_api.get_hf_auto_model_class(hf_config=hf_config)
            module = auto.from_config(hf_config, dtype=config.parameter_dtype, **code)
        if config.freeze_vision_tower:
            _vision_tower(module).requires_grad_(False)
        return _with_adapter(module, model_config)


def _value_model(hf_config: Any, **options: Any) -> nn.Module:
    """Return the architecture's token classifier with one label and no dropout, as verl's critic is."""
    from transformers import AutoModelForTokenClassification

    hf_config.num_labels = 1
    hf_config.classifier_dropout, hf_config.hidden_dropout, hf_config.summary_dropout_prob = 0.0, "0", 0.0
    auto: Any = AutoModelForTokenClassification
    try:
        return auto.from_config(hf_config, **options)
    except ValueError as error:
        raise ModelError(
            f"transformers has no token classifier for {type(hf_config).__name__}, which a critic needs: choose a "
            "critic.model.path of another architecture"
        ) from error


def _vision_tower(module: nn.Module) -> nn.Module:
    for owner in (module, getattr(module, "model", None)):
        for name in _VISION_TOWERS:
            if isinstance(tower := getattr(owner, name, None), nn.Module):
                return tower
    raise ModelError(f"freeze_vision_tower=True: {type(module).__name__} has none of {', '.join(_VISION_TOWERS)}")


def _with_adapter(module: nn.Module, model_config: Any) -> nn.Module:
    path = model_config.get("lora_adapter_path", None)
    if model_config.lora_rank <= 0 and path is None:
        return module
    from peft import LoraConfig, PeftConfig, TaskType, get_peft_model

    try:
        if path is not None:
            adapter = PeftConfig.from_pretrained(path)
            adapter.inference_mode = False
            if isinstance(adapter.task_type, str):
                adapter.task_type = TaskType(adapter.task_type)
        else:
            adapter = LoraConfig(
                task_type=TaskType.CAUSAL_LM,
                r=model_config.lora_rank,
                lora_alpha=model_config.lora_alpha,
                target_modules=verl_api.convert_to_regular_types(model_config.target_modules),
                target_parameters=verl_api.convert_to_regular_types(model_config.get("target_parameters", None)),
                exclude_modules=verl_api.convert_to_regular_types(model_config.exclude_modules),
                bias="none",
            )
        return get_peft_model(module, adapter)
    except (TypeError, ValueError) as error:
        raise OptionError(f"peft refuses the model's settings of LoRA: {error}") from error


def parallelized(
    module: nn.Module, mesh: DeviceMesh, model_config: Any, config: FsdpRuntimeEngineConfig, *, value_head: bool
) -> nn.Module:
    """Apply the steps of a config to a module on the meta device, and load its weights."""
    recompute = config.activation_checkpointing
    if recompute is None:
        recompute = "block" if model_config.enable_gradient_checkpointing and not config.forward_only else "none"
    steps: list[Step[Any]] = [ExpertParallel(exchange=config.exchange)] if config.axes.ep > 1 else []
    if config.pipeline is not None:
        steps.append(config.pipeline)
    if config.float8 is not None:
        steps.append(Float8(config.float8, config.float8_emulate))  # type: ignore[arg-type]
    computes = None if config.compute_dtype == config.parameter_dtype == torch.float32 else config.compute_dtype
    reduces = None if config.gradient_dtype == (computes or torch.float32) else config.gradient_dtype
    policy = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=reduces)
    method: Any = "ulysses" if config.ulysses_sequence_parallel_size > 1 else config.context_parallel
    given = {each.name: getattr(config, each.name) for each in fields(FSDP2) if hasattr(config, each.name)}
    given["mp_policy"] = policy if computes is not None or reduces is not None else None
    given["offload_policy"] = CPUOffloadPolicy() if config.offload_policy else None
    model = parallelize(
        module,
        mesh,
        plan=config.plan,
        sequence_parallel=config.sequence_parallel,
        context_parallel=ContextParallel(method, load_balancer=config.load_balancer),  # type: ignore[arg-type]
        packed_sequences=bool(model_config.use_remove_padding),
        activation_checkpointing=recompute,  # type: ignore[arg-type]
        compile=config.compile,
        fsdp=FSDP2(**given),
        steps=steps,
    )
    if (path := model_config.get("lora_adapter_path", None)) is not None:
        load_adapter(model, path)
    elif model_config.lora_rank > 0:
        init_adapters(model, seed=config.seed)
    # A critic may start from a language model; that checkpoint has no value head.
    heads = [name for name in ("score", "classifier") if value_head and hasattr(model, name)]
    new = dict.fromkeys(heads, getattr(model_config.hf_config, "initializer_range", 0.02))
    load_weights(model, model_config.local_path, training=not config.forward_only, new_modules=new)
    return model


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimizer steps."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(model: nn.Module, optim: Any) -> torch.optim.Optimizer:
    """Build the optimizer of verl's config, of any class named there."""
    parameters = trained_parameters(model)
    optim = fused_on_gpus(optim, {parameter.device.type for parameter in parameters})
    try:
        return verl_api.build_optimizer(parameters, optim)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise OptionError(f"optim: {optim.optimizer_impl}.{optim.optimizer} cannot be built: {error}") from error


def fused_on_gpus(optim: Any, device_types: set[str]) -> Any:
    """Return the config with ``fused=True`` for torch's Adam on GPUs, unless it names an implementation."""
    named, is_torchs = optim.override_optimizer_config or {}, optim.optimizer_impl == "torch.optim"
    is_adam = is_torchs and optim.optimizer in ("Adam", "AdamW")
    if not is_adam or device_types != {"cuda"} or named.keys() & {"fused", "foreach", "differentiable"}:
        return optim
    optim = copy(optim)
    object.__setattr__(optim, "override_optimizer_config", {**named, "fused": True})  # verl freezes its configs
    return optim


def scheduler_of(optimizer: torch.optim.Optimizer, optim: Any) -> Any:
    """Build the schedule of verl's config."""
    steps, warmup = optim.total_training_steps, optim.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(optim.lr_warmup_steps_ratio * steps)
    if optim.lr_scheduler_type == "constant":
        return verl_api.get_constant_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=warmup)
    if optim.lr_scheduler_type == "cosine":
        return verl_api.get_cosine_schedule_with_warmup(
            optimizer=optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            min_lr_ratio=optim.min_lr_ratio,
            num_cycles=optim.num_cycles,
            zero_indexed_step=optim.zero_indexed_step,
        )
    raise OptionError(f"optim.lr_scheduler_type={optim.lr_scheduler_type!r}: write constant or cosine")
