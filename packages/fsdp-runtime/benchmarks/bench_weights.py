"""Loading and streaming weights over four gloo ranks: peak memory, bytes read, and time beside the alternatives.

    python packages/fsdp-runtime/benchmarks/bench_weights.py [--rounds 5]

Contenders take turns in one run, so that a busy machine slows all alike; ratios are medians of those within a round.
Loading is set beside ``from_pretrained`` on every rank, streaming beside bare all-gathers of the same bytes.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[3] / "integration_tests"))
from fsdp_runtime import MeshSpec, load_weights, materialize, parallelize, stream_weights
from fsdp_runtime._torch_compat import all_gather_flat
from harness.memory import LiveBytes

BUCKET = 16 * 2**20


def config() -> Any:
    """A decoder of 44 million parameters, large enough that bytes count and not calls."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )


def on_meta(mesh: Any) -> nn.Module:
    """The model split over the mesh, without storage."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config())
    return parallelize(model, mesh)


def whole(folder: Path) -> nn.Module:
    """What a rank does that splits afterwards."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def local_bytes(model: nn.Module) -> int:
    """Bytes of parameters that this rank holds."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())


def gather_bare(model: nn.Module) -> int:
    """One all-gather a shard and nothing else, over the same axes; the bytes that come out."""
    received = 0
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            continue
        piece = parameter.detach().to_local().contiguous().view(-1)
        for axis, placement in reversed(list(enumerate(parameter.placements))):
            if not placement.is_replicate():
                group = parameter.device_mesh.get_group(axis)
                everyone = piece.new_empty(dist.get_world_size(group) * piece.numel())
                all_gather_flat(everyone, piece, group).wait()
                piece = everyone
        received += piece.nbytes
    return received


def drain(model: nn.Module, bucket_bytes: int) -> int:
    """Stream everything and drop it; the bytes that came."""
    return sum(tensor.nbytes for _, tensor in stream_weights(model, bucket_bytes=bucket_bytes))


def by_full_tensor(model: nn.Module) -> int:
    """DTensor's own way, parameter by parameter."""
    return sum(p.detach().full_tensor().nbytes for p in model.parameters() if isinstance(p, DTensor))


def in_turns(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contender in every round, of the slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, step in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds[name].append(float(slowest))
    return seconds


def report(seconds: Mapping[str, list[float]], base: str) -> None:
    """Print the medians, and the ratios to one contender within each round."""
    if dist.get_rank():
        return
    for name, turns in seconds.items():
        ratio = statistics.median(mine / other for mine, other in zip(turns, seconds[base], strict=True))
        print(f"  {name:40} {statistics.median(turns) * 1e3:9.1f} ms {ratio:8.2f}")


def bench(rank: int, folder: Path, axes: dict[str, int], rounds: int) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{axes}", rank=rank, world_size=4)
    mesh = MeshSpec(**axes).build(device_type="cpu")

    model = materialize(on_meta(mesh))
    with LiveBytes() as live:
        read = load_weights(model, folder).bytes_read
    held = local_bytes(model)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    peaks = {"load, beside the shards": (live.peak, largest)}
    for bucket in (BUCKET, 4 * BUCKET):
        with LiveBytes() as live:
            total = drain(model, bucket)
        peaks[f"stream, buckets of {bucket // 2**20} MiB"] = (live.peak, max(bucket, largest))
    if rank == 0:
        print(f"\n{axes}: {total / 2**20:.0f} MiB of weights, {held / 2**20:.0f} on a rank, {read / 2**20:.0f} read")
        for name, (peak, bound) in peaks.items():
            print(f"  peak of {name:32} {peak / 2**20:9.1f} MiB {peak / bound:8.2f} of {bound / 2**20:.0f}")

    loading = {
        "load_weights": lambda: load_weights(model, folder),
        "meta model, parallelize, load_weights": lambda: load_weights(on_meta(mesh), folder),
        "from_pretrained on every rank": lambda: whole(folder),
    }
    report(in_turns(loading, rounds), "from_pretrained on every rank")
    streaming = {
        "stream_weights": lambda: drain(model, BUCKET),
        "bare all-gathers": lambda: gather_bare(model),
        "full_tensor() of each": lambda: by_full_tensor(model),
    }
    times = in_turns(streaming, rounds)
    report(times, "bare all-gathers")
    if rank == 0:
        print(f"  streamed {total / statistics.median(times['stream_weights']) / 2**20:.0f} MiB a second")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    from transformers import LlamaForCausalLM

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        LlamaForCausalLM(config()).save_pretrained(folder)
        for axes in ({"dp_shard": 4}, {"dp_shard": 2, "tp": 2}):
            mp.spawn(bench, args=(folder, axes, rounds), nprocs=4)


if __name__ == "__main__":
    main()
