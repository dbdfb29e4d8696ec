"""How long ``parallelize`` takes for an 80-layer model on the meta device, as one rank of 1024 that are not there.

python packages/fsdp-runtime/benchmarks/bench_parallelize.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_runtime import MeshSpec, describe_parallelism, parallelize

Result = TypeVar("Result")
RANKS = 1024


def seventy_billion() -> nn.Module:
    """A decoder of Llama 3's 70B shape, without storage."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def timed(what: str, function: Callable[[], Result]) -> Result:
    """Run a function and print the seconds on the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    result = function()
    print(f"{what:42} {time.perf_counter() - clock:7.2f} s {time.process_time() - processor:7.2f} s of the processor")
    return result


def main() -> None:
    """Print one line a step."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = timed("mesh of 16 x 8 x 8", lambda: MeshSpec(dp_replicate=16, dp_shard=8, tp=8).build(device_type="cpu"))
    for options in ({}, {"sequence_parallel": True, "activation_checkpointing": "block"}):
        model = timed("model on the meta device", seventy_billion)
        told = ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"
        timed(f"parallelize, {told}"[:42], lambda m=model, o=options: parallelize(m, mesh, **o))
        report = timed("report", lambda m=model: describe_parallelism(m))
    print(report)


if __name__ == "__main__":
    main()
