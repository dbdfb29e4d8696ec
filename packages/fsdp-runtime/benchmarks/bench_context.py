"""Bytes, collectives and live memory of attention over cp in each way, one layer, forward and backward.

One rank of a fake world of ``--ranks`` runs on tensors without data; collectives are counted and return at once, so
that the numbers of bytes are exact and no time is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "integration_tests"))
from fsdp_runtime import MeshSpec
from fsdp_runtime.dry_run.trace.fake_world import fake_tensors_without_data, fake_world
from fsdp_runtime.mesh.collectives import min_bytes_sent
from fsdp_runtime.steps import ContextAttention
from fsdp_runtime.steps.context.methods import Method
from harness.collectives import RecordCollectives
from harness.memory import LiveBytes


def measure(way: Method, options: argparse.Namespace) -> tuple[int, str, int]:
    """Return the bytes that leave the rank, its collectives, and the peak of all tensors but the inputs."""
    with fake_world(MeshSpec(cp=options.ranks), rank=0) as mesh, fake_tensors_without_data():
        heads = (options.heads, options.kv_heads, options.kv_heads)
        size = options.tokens // options.ranks
        query, key, value = (
            torch.zeros(1, each, size, options.dim, dtype=torch.bfloat16, requires_grad=True) for each in heads
        )
        attention = ContextAttention(mesh.get_group("cp"), "headtail", way)
        with RecordCollectives() as record, LiveBytes() as memory:
            attention.attend(nn.Identity(), query, key, value, attention_mask=None)[0].sum().backward()
    sent = sum(min_bytes_sent(call.kind, call.nbytes, options.ranks) for call in record.calls)
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(call.kind for call in record.calls).items())
    return sent, kinds, memory.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384, help="of the full sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    print(f"{options.tokens} tokens over {options.ranks} ranks, {options.heads} and {options.kv_heads} heads, bf16")
    print(f"  {'way':10} {'KiB sent / token':>17} {'peak MiB':>9}  collectives")
    for way in get_args(Method):
        sent, kinds, peak = measure(way, options)
        print(f"  {way:10} {sent / 1024 / (options.tokens // options.ranks):17.1f} {peak / 2**20:9.1f}  {kinds}")


if __name__ == "__main__":
    main()
