"""A Muon step of a sharded Llama on gloo ranks: this package, ``torch.optim.Muon`` on DTensors, owners by count.

    python packages/fsdp-runtime/benchmarks/bench_muon.py [--rounds 5] [--ranks 2]

Both optimizers update the same matrices, and take turns in one run.  Counts are of one rank: collectives, bytes that
it puts in, blocks for itself included, and operations.  The last row is arithmetic: with equal owners, as in
torchtitan's and Dion's distributed Muon, a rank puts in its block of every matrix, and its matrices' updates.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[3] / "integration_tests"))
from turns import take_turns

from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.optim import Muon
from harness.collectives import RecordCollectives


def sharded(ranks: int) -> Any:
    """Return a Llama over ``dp_shard`` with gradients."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8))
    model = parallelize(model, MeshSpec(dp_shard=ranks).build(device_type="cpu"), logits="full")
    model(input_ids=torch.arange(32)[None]).logits.square().mean().backward()
    return model


def rank(index: int, store: str, ranks: int, rounds: int) -> None:
    """Measure both optimizers on one process; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=ranks)
    model = sharded(ranks)
    ours = Muon(model, lr=1e-3)
    matrices = [p for group in ours.param_groups if group["use_muon"] for p in group["params"]]
    for parameter in set(model.parameters()) - set(matrices):
        parameter.grad = None
    theirs = torch.optim.Muon(matrices, lr=1e-3)
    steps: dict[str, Callable[[], object]] = {"ours": ours.step, "torch.optim.Muon": theirs.step}
    counts = {}
    for name, step in steps.items():
        step()  # the first step plans
        with RecordCollectives() as traffic, FlopCounterMode(display=False) as flops:
            step()
        counts[name] = len(traffic.calls), sum(call.nbytes for call in traffic.calls), flops.get_total_flops()
    medians = take_turns(steps, rounds)
    if index == 0:
        for name, (clock, busy) in medians.items():
            calls, nbytes, operations = counts[name]
            print(
                f"{name:20} {clock * 1e3:6.0f} ms a step, {busy * 1e3:6.0f} ms of the processor, {calls} collectives, "
                f"{nbytes / 1e6:.2f} MB, {operations / 1e9:.2f} GFLOP"
            )
        both = zip(medians["ours"], medians["torch.optim.Muon"], strict=True)
        clock, busy = (mine / other for mine, other in both)
        print(f"ours / torch: {clock:.2f} on the clock, {busy:.2f} of the processor")
        elements = sum(matrix.numel() for matrix in matrices)
        least = 2 * 2 * elements / ranks  # bfloat16, there and back
        least_flops = counts["torch.optim.Muon"][2] / ranks
        print(f"equal owners, by count: 2 collectives a bucket, {least / 1e6:.2f} MB, {least_flops / 1e9:.2f} GFLOP")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (f"{folder}/store", arguments.ranks, arguments.rounds), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
