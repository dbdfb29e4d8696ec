"""Saving and loading weights on gloo ranks beside plain files, transformers and torch's distributed checkpoint.

    python packages/fsdp-runtime/benchmarks/bench_weights.py [--gib 0.5] [--rounds 3] [--only REGEX]

Contenders take turns in one run, so that a busy machine slows all alike; ratios are medians of those within a round.
Plain writing is each rank's share of the bytes to a file of its own, with fsync; plain reading is the same, with the
page cache dropped before, as for every load.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[3] / "integration_tests"))
from fsdp_runtime import MeshSpec, load_weights, materialize, parallelize, save_weights
from harness.memory import LiveBytes

LAYOUTS: tuple[dict[str, int], ...] = (
    {"dp_shard": 2},
    {"tp": 2},
    {"dp_shard": 4},
    {"tp": 4},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 4, "ep": 4},
)
MOVED_AT_ONCE = 2**26


def model_on_meta(axes: Mapping[str, int], nbytes: float) -> nn.Module:
    """A decoder of about so many bytes in bfloat16, with experts where they are split."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shared = {
        "vocab_size": 16384,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }
    per_block = 2 * (3 * 1024**2 + 3 * 1024 * 4096)
    blocks = max(round((nbytes - 2 * 2 * 16384 * 1024) / per_block), 1)
    with torch.device("meta"):
        if "ep" in axes:
            experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=blocks, head_dim=64, **experts, **shared)).to(
                torch.bfloat16
            )
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=blocks, intermediate_size=4096, **shared)).to(
            torch.bfloat16
        )


class Bench:
    """One rank of one layout.

    Args:
        folder: on the disk that is measured, the same for all ranks.
        axes: of the mesh.
        nbytes: of the model, about.
    """

    def __init__(self, folder: Path, axes: Mapping[str, int], nbytes: float) -> None:
        self._folder, self._axes, self._nbytes = folder, axes, nbytes
        self._mesh = MeshSpec(**axes).build(device_type="cpu")
        self._model = materialize(parallelize(model_on_meta(axes, nbytes), self._mesh))
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.to_local().normal_(std=0.02) if hasattr(parameter, "to_local") else parameter.fill_(0.1)
        self._checkpoint = folder / "checkpoint"
        with LiveBytes() as live:
            total = torch.tensor(save_weights(self._model, self._checkpoint).bytes_written)
        self._held_in_save = live.peak
        dist.all_reduce(total)
        self.total = int(total)
        self._file = -(-self.total // dist.get_world_size())  # bytes of one of as many files as ranks
        save_weights(self._model, self._checkpoint, max_shard_size=self._file)
        self._share = torch.full((self.total // dist.get_world_size(),), 7, dtype=torch.uint8)
        self._whole: nn.Module | None = None

    def saves(self) -> dict[str, Callable[[], object]]:
        """What is compared with writing."""
        if dist.get_rank() == 0:
            self._whole = type(self._model).from_pretrained(self._checkpoint)
        return {
            "plain writing, fsync": self._write,
            "save_weights, a file per rank": lambda: save_weights(
                self._model, self._fresh("ours"), max_shard_size=self._file
            ),
            "save_weights, one file": lambda: save_weights(self._model, self._fresh("one")),
            "save_weights, asynchronous: held": self._held,
            "torch DCP, consolidated": self._dcp,
            "save_pretrained on rank 0 alone": self._save_pretrained,
        }

    def loads(self) -> dict[str, Callable[[], object]]:
        """What is compared with reading."""
        return {
            "plain reading": self._read,
            "load_weights": lambda: load_weights(self._model, self._checkpoint),
            "from_pretrained on every rank": lambda: type(self._model).from_pretrained(self._checkpoint),
        }

    def drop_cache(self) -> None:
        """Let what was read before be read from the disk again."""
        dist.barrier()
        for file in self._folder.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def peaks(self) -> dict[str, int]:
        """The most bytes that this rank holds besides the model's."""
        with LiveBytes() as live:
            load_weights(self._model, self._checkpoint)
        return {"held in a save to one file": self._held_in_save, "held in a load": live.peak}

    def _fresh(self, name: str) -> Path:
        return self._folder / name

    def _write(self) -> None:
        file = self._folder / f"plain-{dist.get_rank()}"
        descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        view = memoryview(self._share.numpy())
        while view:
            view = view[os.write(descriptor, view[:MOVED_AT_ONCE]) :]
        os.fsync(descriptor)
        os.close(descriptor)

    def _read(self) -> None:
        view = memoryview(self._share.numpy())
        with (self._folder / f"plain-{dist.get_rank()}").open("rb", buffering=0) as file:
            while view:
                view = view[file.readinto(view[:MOVED_AT_ONCE]) :]

    def _held(self) -> float:
        start = time.perf_counter()
        future = save_weights(self._model, self._fresh("asynchronous"), max_shard_size=self._file, asynchronous=True)
        held = time.perf_counter() - start
        future.wait()
        return held

    def _dcp(self) -> None:
        state = self._model.state_dict()
        writer = HuggingFaceStorageWriter(
            str(self._fresh("dcp")),
            fqn_to_index_mapping=dict.fromkeys(state, 1),
            save_distributed=True,
            enable_consolidation=True,
        )
        dcp.save(state, storage_writer=writer)

    def _save_pretrained(self) -> None:
        if self._whole is not None:
            self._whole.save_pretrained(self._fresh("transformers"))
            for file in self._fresh("transformers").iterdir():
                descriptor = os.open(file, os.O_RDWR)
                os.fsync(descriptor)
                os.close(descriptor)


def in_turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds of every contender in every round, of the slowest rank; one that returns seconds measures itself."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, step in contenders.items():
            before()
            dist.barrier()
            start = time.perf_counter()
            own = step()
            slowest = torch.tensor(own if isinstance(own, float) else time.perf_counter() - start)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds[name].append(float(slowest))
    return seconds


def report(seconds: Mapping[str, list[float]], total: int) -> None:
    """Print the medians, the rates, and the ratios to the first contender within each round."""
    base = next(iter(seconds.values()))
    for name, turns in seconds.items():
        ratio = statistics.median(mine / other for mine, other in zip(turns, base, strict=True))
        middle = statistics.median(turns)
        print(f"  {name:36} {middle:8.2f} s {total / middle / 2**30:7.2f} GiB/s {ratio:7.2f}", flush=True)


def bench(rank: int, folder: Path, axes: dict[str, int], nbytes: float, rounds: int) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    world = prod(size for axis, size in axes.items() if axis != "ep")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    run = Bench(folder, axes, nbytes)
    saving = in_turns(run.saves(), rounds, dist.barrier)
    loading = in_turns(run.loads(), rounds, run.drop_cache)
    peaks = run.peaks()
    found: list[dict[str, int]] = [{}] * world
    dist.all_gather_object(found, peaks)
    if rank == 0:
        print(f"\n{json.dumps(axes)}: {run.total / 2**30:.2f} GiB", flush=True)
        report(saving, run.total)
        report(loading, run.total)
        for name in peaks:
            most, every = max(each[name] for each in found), sum(each[name] for each in found)
            print(f"  {name:36} {most / 2**20:8.0f} MiB on a rank, {every / run.total:.2f} of the model in all")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=0.5, help="of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a regular expression for layouts, such as 'tp.: 4'")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for axes in LAYOUTS:
        if not re.search(options.only, json.dumps(axes)):
            continue
        folder = Path(tempfile.mkdtemp(dir=options.directory))
        try:
            world = prod(size for axis, size in axes.items() if axis != "ep")
            mp.spawn(bench, args=(folder, axes, options.gib * 2**30, options.rounds), nprocs=world)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
