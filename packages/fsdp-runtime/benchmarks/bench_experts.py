"""A training step of a mixture on four gloo ranks: this package over ``ep`` and over ``tp``, and transformers' ``ep``.

    python packages/fsdp-runtime/benchmarks/bench_experts.py [--rounds 6]

All have the same weights, tokens and data-parallel ranks (dp_shard=2, tp=2) and take turns in one run.  Times are
medians over rounds, of the slowest rank on the clock and of the mean rank's processor; bytes are what one rank puts
into collectives.  What a layer adds is the difference between two models.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3] / "integration_tests"))
from turns import take_turns

from fsdp_runtime import MeshSpec, parallelize, submesh
from harness.collectives import RecordCollectives

BATCH, LENGTH, VOCAB = 2, 256, 2048
LAYERS = (2, 4)


def config(layers: int) -> Any:
    """A narrow mixture, 8 of 32 experts a token."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=8,
    )


def ours(folder: Path, *, ep: int | None = None) -> nn.Module:
    """This package; without ``ep`` the experts are divided over ``tp``."""
    from transformers import Qwen3MoeForCausalLM

    mesh = MeshSpec(dp_shard=2, tp=2, ep=ep or 1).build(device_type="cpu")
    return parallelize(Qwen3MoeForCausalLM.from_pretrained(folder), mesh, logits="full")


def by_transformers(folder: Path, *, ep: int) -> nn.Module:
    """``from_pretrained`` with a ``DistributedConfig``."""
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=2, fsdp_size=2, ep_size=ep)
    return Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=config)


CONTENDERS: dict[str, Callable[[Path], nn.Module]] = {
    "ours, ep=2": partial(ours, ep=2),
    "transformers, ep=2": partial(by_transformers, ep=2),
    "ours, ep=4": partial(ours, ep=4),
    "transformers, ep=4": partial(by_transformers, ep=4),
    "ours, experts over tp": ours,
}


def step(model: nn.Module, ids: Tensor) -> float:
    """A forward and a backward; the loss."""
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.item()


def rank(index: int, store: str, folder: str, rounds: int) -> None:
    """What each process does; rank 0 prints."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=4)
    data = submesh(MeshSpec(dp_shard=2, tp=2).build(device_type="cpu"), "dp")
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(data.get_local_rank()))
    models, losses = {}, {}
    traffic: dict[str, dict[int, Counter[str]]] = {}
    for name, build in CONTENDERS.items():
        for layers in LAYERS:  # the timed model is the last
            models[name] = build(Path(folder, str(layers)))
            step(models[name], ids)
            with RecordCollectives() as communication:
                losses[name] = step(models[name], ids)
            calls, nbytes = communication.counts(), Counter[str]()
            for call in communication.calls:
                nbytes[f"{call.kind} bytes"] += call.nbytes
            traffic.setdefault(name, {})[layers] = calls + nbytes
    medians = take_turns({name: partial(step, model, ids) for name, model in models.items()}, rounds)
    if index == 0:
        show(medians, losses, traffic)
    dist.destroy_process_group()


def show(
    medians: dict[str, list[float]], losses: dict[str, float], traffic: dict[str, dict[int, Counter[str]]]
) -> None:
    """Print the table."""
    fewer, more = LAYERS
    for name, (clock, busy) in medians.items():
        print(f"{name:22} {clock * 1e3:6.0f} ms a step, {busy * 1e3:6.0f} ms of the processor, loss {losses[name]:.6f}")
        found = traffic[name]
        layer = {key: (found[more][key] - found[fewer][key]) / (more - fewer) for key in found[more]}
        kinds = sorted(key for key in layer if f"{key} bytes" in layer)
        told = [f"{layer[kind]:g} {kind} of {layer[f'{kind} bytes'] / 1e6:.2f} MB" for kind in kinds if layer[kind]]
        total = sum(found[more][f"{kind} bytes"] for kind in kinds)
        print(f"    a layer: {', '.join(told)}; all {more} layers with embedding and head: {total / 1e6:.1f} MB")


def main() -> None:
    """Write the checkpoints, start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    from transformers import Qwen3MoeForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        for layers in LAYERS:
            torch.manual_seed(0)
            Qwen3MoeForCausalLM(config(layers)).save_pretrained(Path(folder, str(layers)))
        mp.spawn(rank, (f"{folder}/store", folder, arguments.rounds), nprocs=4)


if __name__ == "__main__":
    main()
