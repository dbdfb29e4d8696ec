"""Changes that would lower the peak, with savings that are known without another dry run."""

from __future__ import annotations

from fsdp_runtime.dry_run.types import Advice, Memory, Settings

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
