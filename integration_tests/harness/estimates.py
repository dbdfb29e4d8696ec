"""Estimates made by hand, for what is done with them: ranking, tables, charts."""

from __future__ import annotations

from typing import Any

from fsdp_runtime.dry_run import (
    Advice,
    Assumption,
    Estimate,
    Memory,
    MemoryBreakdown,
    Peak,
    ReplicatedParameters,
    Settings,
    Traffic,
)

GIB = 2**30


def made_settings(**changes: Any) -> Settings:
    """Settings of an 80-layer model on 1,024 ranks."""
    told: dict[str, Any] = {
        "model": "LlamaForCausalLM",
        "parameters": 70_553_706_496,
        "mesh": {"dp_replicate": 4, "dp_shard": 32, "cp": 1, "tp": 8},
        "world_size": 1024,
        "rank": 0,
        "seq_len": 8192,
        "micro_batch": 1,
        "plan": "auto",
        "sequence_parallel": True,
        "activation_checkpointing": "block",
        "dtype": "bf16",
        "master_dtype": "fp32",
        "optimizer": "adamw",
        "logprobs": "logits",
        "offload": False,
        "blocks": 80,
        "traced": (2, 3),
        "scaling": "2 and 3 of 80 blocks were run, the others follow exactly",
    }
    return Settings(**{**told, **changes})


def made_estimate(*, peak: int = 34 * GIB, seconds: float | None = 0.25, **changes: Any) -> Estimate:
    """An estimate with so many bytes at its peak, and traffic over two axes that takes so long."""
    held = MemoryBreakdown(parameters=1 * GIB, optimizer_state=2 * GIB, buffers=1024)
    highest = MemoryBreakdown(
        parameters=1 * GIB, optimizer_state=2 * GIB, gradients=1 * GIB, activations=peak - 4 * GIB
    )
    phases = (
        Peak(phase="forward", module="model.layers.79.mlp", operator="aten.mm.default", nbytes=held),
        Peak(phase="backward", module="model.layers.<79>.mlp", operator="aten.mm.default", nbytes=highest),
    )
    half = None if seconds is None else seconds / 2
    told: dict[str, Any] = {
        "settings": made_settings(),
        "memory": Memory(resident=held, after_forward=highest, after_backward=held, phases=phases),
        "traffic": (
            made_traffic(axis="tp", phase="forward", kind="all_gather", seconds=half),
            made_traffic(axis="dp_shard", phase="forward", kind="all_gather", seconds=None),
            made_traffic(axis="tp", phase="backward", kind="all_gather", seconds=half),
            made_traffic(axis="tp", phase="backward", kind="reduce_scatter", seconds=None),
        ),
        "flops": 3 * 10**15,
        "replicated": (
            ReplicatedParameters(pattern="model.layers.*.input_layernorm.weight", count=80, nbytes=80 * 16384),
        ),
        "findings": ("warning: heads & <groups>",),
        "assumptions": (
            Assumption(operator="aten.nonzero.default", module="model.layers.*.mlp", assumption="tokens spread evenly"),
        ),
        "advice": (Advice(change="micro_batch=1", saves=2 * GIB), Advice(change="logprobs='linear'")),
        "seconds": 12.5,
    }
    return Estimate(**{**told, **changes})


def made_traffic(**changes: Any) -> Traffic:
    """Ten calls that put in a MiB and move seven."""
    told: dict[str, Any] = {
        "axis": "tp",
        "ranks": 8,
        "phase": "forward",
        "kind": "all_gather",
        "count": 10,
        "nbytes": 2**20,
        "bytes_sent": 7 * 2**20,
    }
    return Traffic(**{**told, **changes})
