"""What a step costs beside verl's engine, and the bytes that each way sends to the rollout: a table in Markdown.

    PYTHONPATH=integration_tests torchrun --nproc-per-node=2 -m with_verl.costs

One batch of PPO with entropies, packed rows, float32.  Peak bytes are what the CPU's allocator hands out in one update,
on the rank with most, beyond what was allocated before.  Seconds are processor time of both ranks, the least of three.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from with_verl import drive

VOCAB, LENGTH, SAMPLES = 32_000, 128, 8
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "verl's FSDP2, `dp=2`": (drive.VERLS, {}),
    "`dp_shard=2`": (drive.OURS, {}),
    "`tp=2`": (drive.OURS, {"tp": 2}),
    "`tp=2`, `sequence_parallel`": (drive.OURS, {"tp": 2, "sequence_parallel": True}),
}


def main() -> None:
    """Print the two tables on rank 0."""
    dist.init_process_group("gloo")
    with TemporaryDirectory() as folder:
        path = [str(Path(folder) / "model")]
        if dist.get_rank() == 0:
            _write(path[0])
        dist.broadcast_object_list(path)
        rows = [(name, *_step(engine, path[0], options)) for name, (engine, options) in CONTENDERS.items()]
        ways = list(_ways(path[0]))
    if dist.get_rank() == 0:
        print("| engine | peak of an update | processor time of an update |\n|---|---|---|")
        for name, peak, seconds in rows:
            print(f"| {name} | {peak / 2**20:.0f} MiB | {seconds:.2f} s |")
        print("\n| way | bytes |\n|---|---|")
        for name, size in ways:
            print(f"| {name} | {size:,} |")
    dist.destroy_process_group()


def _write(path: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)


def _samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    response = LENGTH // 2
    return [
        {
            "ids": torch.randint(1, VOCAB, (LENGTH,), generator=generator),
            "prompt": torch.tensor(LENGTH - response),
            **{
                name: torch.randn(response, generator=generator)
                for name in ("old_log_probs", "advantages", "values", "returns")
            },
        }
        for _ in range(SAMPLES)
    ]


def _update(engine: Any) -> None:
    batch = drive.batch_of(engine, _samples(), max_token_len_per_gpu=SAMPLES * LENGTH // 2)
    with engine.train_mode():
        engine.train_batch(batch, drive.loss_of("ppo", engine))


def _step(name: str, path: str, options: dict[str, Any]) -> tuple[int, float]:
    """The largest peak of the ranks, and the sum of their least processor times."""
    engine = drive.build(name, path, **options)
    _update(engine)  # states of the optimizer
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _update(engine)
    live = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    times = []
    for _ in range(3):
        start = time.process_time()
        _update(engine)
        times.append(time.process_time() - start)
    most, total = torch.tensor(peak), torch.tensor(min(times))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return int(most), float(total)


def _ways(path: str) -> Iterator[tuple[str, int]]:
    """Bytes in bfloat16: full tensors, a rank's shards, and what one update with a learning rate of RL changed."""
    engine = drive.build(drive.OURS, path, tp=2, sync_dtype="bf16", lr=1e-6)
    full, _ = engine.get_per_tensor_param()
    yield "full tensors, from one rank", sum(tensor.nbytes for _, tensor in full)
    shards, _ = engine.get_per_tensor_param_shard()
    own = torch.tensor(sum(values.nbytes for _, values, spec in shards if spec.contributes))
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    yield "shards, from the rank that sends most", int(own)
    engine.prime_delta_snapshots()
    _update(engine)
    deltas, _ = engine.get_per_tensor_param_delta_shard()
    changed = torch.tensor(sum(index.nbytes + values.nbytes for _, _, _, index, values, _ in deltas))
    dist.all_reduce(changed)
    yield "what one update changed, from all ranks", int(changed)


if __name__ == "__main__":
    main()
