"""Changes that would lower the peak, with savings that are known without another dry run."""

from __future__ import annotations

from fsdp_runtime.dry_run.types import Advice, Memory, Settings


def advice_for(settings: Settings, memory: Memory, device_memory: int | None) -> tuple[Advice, ...]:
    """Return changes that lower the peak, largest savings first; none if the process leaves 10 % of the device free."""
    peak = memory.peak.nbytes
    if device_memory is None or memory.device <= 0.9 * device_memory:
        return ()
    mesh = settings.mesh
    found: list[Advice] = []
    if settings.activation_checkpointing == "none" and peak.activations:
        saved = peak.activations - peak.activations // max(1, settings.blocks)
        found.append(Advice(change="activation_checkpointing='block': keep one hidden state per block", saves=saved))
    if settings.logprobs == "logits" and peak.logits:
        found.append(
            Advice(change="logprobs='linear': compute the loss from hidden states, without logits", saves=peak.logits)
        )
    if not settings.sequence_parallel and mesh["tp"] > 1 and peak.activations:
        found.append(
            Advice(
                change="sequence_parallel=True: shard activations between layers over tp",
                saves=peak.activations * (mesh["tp"] - 1) // mesh["tp"],
            )
        )
    states = peak.parameters + peak.gradients + peak.optimizer_state
    if mesh["dp_replicate"] > 1:
        shards, replicas = mesh["dp_shard"], mesh["dp_replicate"]
        found.append(
            Advice(
                change=f"dp_shard={shards * replicas}, dp_replicate=1: shard over all data-parallel ranks",
                saves=states * (replicas - 1) // replicas,
            )
        )
    if memory.peak.phase == "optimizer" and settings.optimizer == "adamw" and peak.temporaries:
        change = "optimizer='adamw_fused': AdamW(fused=True), without the temporaries of foreach"
        found.append(Advice(change=change, saves=peak.temporaries))
    if not settings.offload and states:
        found.append(
            Advice(change="offload=True: keep parameters, gradients and optimizer state on the host", saves=states)
        )
    if settings.micro_batch > 1:
        saved = (peak.activations + peak.logits + peak.temporaries) * (settings.micro_batch - 1) // settings.micro_batch
        found.append(Advice(change="micro_batch=1, with gradient accumulation for the rest of the batch", saves=saved))
    found.append(Advice(change=f"tp={2 * mesh['tp']}, or twice the ranks in dp_shard"))
    return tuple(sorted(found, key=lambda item: -(item.saves or 0)))
