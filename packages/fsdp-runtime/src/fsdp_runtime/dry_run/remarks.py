"""Advice and assumptions of an estimate, in words: changes that would lower its peak, and facts that it lacks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fsdp_runtime.dry_run.report.format import format_bytes
from fsdp_runtime.dry_run.scale.summary import add_up, wildcard
from fsdp_runtime.dry_run.step import OPTIMIZERS, StepConfig
from fsdp_runtime.dry_run.types import Advice, Assumption, Memory, Settings

#: Part of the live bytes from which free blocks between live ones are worth segments that grow.
_FRAGMENTED = 0.05


def advice_for(
    settings: Settings, memory: Memory, device_memory: int | None, *, segments_grow: bool = False
) -> tuple[Advice, ...]:
    """Return changes that lower the peak, largest savings first; none if the process leaves 10 % of the device free."""
    if device_memory is None or memory.device <= 0.9 * device_memory:
        return ()
    savings = _known(settings, memory)
    if not segments_grow and (memory.fragmentation or 0) > _FRAGMENTED * memory.peak.total:
        change = "PYTORCH_ALLOC_CONF=expandable_segments:True: segments that grow leave fewer blocks unused"
        savings[change] = memory.fragmentation
    savings[f"tp={2 * settings.mesh['tp']}, or twice the ranks in dp_shard"] = None
    by_savings = sorted(savings.items(), key=lambda item: -(item[1] or 0))
    return tuple(Advice(change=change, saves=saves) for change, saves in by_savings)


def _known(settings: Settings, memory: Memory) -> dict[str, int | None]:
    peak, batch = memory.peak.nbytes, settings.micro_batch
    tp, shards, replicas = (settings.mesh[axis] for axis in ("tp", "dp_shard", "dp_replicate"))
    states = peak.parameters + peak.gradients + peak.optimizer_state
    savings: dict[str, int | None] = {}
    if settings.activation_checkpointing == "none" and peak.activations:
        saved = peak.activations - peak.activations // max(1, settings.blocks)
        savings["activation_checkpointing='block': keep one hidden state per block"] = saved
    elif not settings.offload_activations and peak.activations:
        # Backward holds the activations of the block that it computes, and of the block before.
        saved = peak.activations - 2 * peak.activations // max(2, settings.blocks)
        savings["ActivationCheckpointing(..., offload=True): keep blocks' inputs on the host until backward"] = saved
    if settings.logprobs == "logits" and peak.logits:
        savings["logprobs='linear': compute the loss from hidden states, without logits"] = peak.logits
    if not settings.sequence_parallel and tp > 1 and peak.activations:
        savings["sequence_parallel=True: shard activations between layers over tp"] = peak.activations * (tp - 1) // tp
    if replicas > 1:
        change = f"dp_shard={shards * replicas}, dp_replicate=1: shard over all data-parallel ranks"
        savings[change] = states * (replicas - 1) // replicas
    if memory.peak.phase == "optimizer" and settings.optimizer == "adamw" and peak.temporaries:
        savings["optimizer='adamw_fused': AdamW(fused=True), without the temporaries of foreach"] = peak.temporaries
    if settings.frozen and not settings.quantized:
        change = "steps=(Quantized('nf4'),): pack the frozen layers in 4.5 bits a weight, on any mesh"
        savings[change] = settings.frozen - settings.frozen * 9 // (32 if settings.dtype == "bf16" else 64)
    if settings.optimizer.startswith("adamw") and "bit" not in settings.optimizer and peak.optimizer_state:
        width = 4 if "fp32" in (settings.master_dtype, settings.dtype) else 2
        saved = peak.optimizer_state * (64 * width - 65) // (64 * width)
        savings["optimizer='adamw_8bit': LowBitAdamW, with moments in 8 bits on any mesh"] = saved
    if not settings.offload and states:
        change = "CPUOffloadPolicy() in fsdp=, or --offload: keep parameters, gradients and optimizer state on the host"
        savings[change] = states
        change = "optimizer='adamw_cpu_offload': CPUOffloadAdamW(...), keep optimizer state on the host"
        savings |= {change: peak.optimizer_state} if peak.optimizer_state else {}
    if batch > 1:
        saved = (peak.activations + peak.logits + peak.temporaries) * (batch - 1) // batch
        savings["micro_batch=1, with gradient accumulation for the rest of the batch"] = saved
    return savings


def untrained_assumptions(
    model: nn.Module, untrained: Mapping[str, tuple[int, ...]], step: StepConfig
) -> list[Assumption]:
    """Return the missing numbers for each part of the model that the step does not reach."""
    has_vision = getattr(getattr(model, "config", None), "vision_config", None) is not None
    trained = {wildcard(name) for name, each in model.named_parameters() if each.requires_grad} - untrained.keys()
    assumptions = []
    for part, (count, size) in add_up((_part_of(pattern), sizes) for pattern, sizes in untrained.items()).items():
        unused = has_vision and part not in map(_part_of, trained)
        reason = "the step has text and no images or other media" if unused else "the step does not use all of it"
        state = format_bytes(int(OPTIMIZERS[step.optimizer][1] * size))
        sizes = f"{format_bytes(size)} of gradients and {state} of optimizer state"
        if step.assume_gradients:
            counted = f"{sizes} are counted as if it had been trained, and its activations, traffic and work are not"
        else:
            counted = (
                f"it would have {sizes} on this rank, and activations; assume_gradients=True counts the first two, and "
                "requires_grad_(False) freezes it"
            )
        text = f"{reason}, so {count} trainable parameters have no gradient: {counted}"
        assumptions.append(Assumption(operator="", module=part, assumption=text, counted=False))
    return assumptions


def quantization_assumptions(model: nn.Module) -> list[Assumption]:
    """Return an assumption for a config with quantized weights: without ``Quantized`` they are dequantized."""
    config = getattr(model, "config", None)
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return []
    fields = quantization if isinstance(quantization, Mapping) else vars(quantization)
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method", "an unknown method")))
    text = (
        f"the config says that the checkpoint is quantized ({method}), and the numbers count dequantized weights "
        "unless steps has Quantized: load_weights refuses schemes other than nf4, int4, int8, FP8 and MXFP4"
    )
    return [Assumption(operator="", module="", assumption=text)]


def _part_of(pattern: str) -> str:
    """Return the outermost module of a parameter below the model's base: ``model.visual`` of its weights."""
    modules = pattern.split(".")[:-1]
    named = modules[: modules.index("*")] if "*" in modules else modules
    return ".".join(named[:2])
