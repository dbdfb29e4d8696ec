"""A training step of TP x FSDP2 on four gloo ranks: this package, transformers' own path and hand-written torch.

    python packages/fsdp-runtime/benchmarks/bench_step.py [--rounds 12]

Contenders take turns in one run, so that a busy machine slows all alike.  Times are medians over rounds, of the
slowest rank on the clock and of the mean rank's processor; bytes are what one rank puts into collectives.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[3] / "integration_tests"))
from turns import take_turns

from fsdp_runtime import MeshSpec, parallelize, submesh
from fsdp_runtime.model import inspect_model
from harness.collectives import RecordCollectives, by_axis

BATCH, LENGTH, VOCAB = 2, 256, 8192


def config() -> Any:
    """A decoder whose step is long against the overhead of a call, and short enough to repeat."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
    )


def ours(folder: Path, mesh: Any, **options: Any) -> nn.Module:
    """This package."""
    from transformers import LlamaForCausalLM

    return parallelize(LlamaForCausalLM.from_pretrained(folder), mesh, logits="full", **options)


def by_transformers(folder: Path, mesh: Any) -> nn.Module:
    """``from_pretrained`` with a ``DistributedConfig``."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    del mesh
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))


def by_hand(folder: Path, mesh: Any, *, sequence_parallel: bool = False) -> nn.Module:
    """``parallelize_module`` and ``fully_shard``, as torch's tutorials write them."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    stream: Any = Shard(1) if sequence_parallel else Replicate()
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=stream, use_local_output=not sequence_parallel
        ),
        **{f"{attention}.{name}_proj": ColwiseParallel() for name in "qkv"},
        f"{attention}.o_proj": RowwiseParallel(output_layouts=stream, use_local_output=not sequence_parallel),
        f"{mlp}.gate_proj": ColwiseParallel(),
        f"{mlp}.up_proj": ColwiseParallel(),
        f"{mlp}.down_proj": RowwiseParallel(output_layouts=stream, use_local_output=not sequence_parallel),
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if sequence_parallel:
        norm = SequenceParallel(use_local_output=False)
        plan |= {"model.norm": norm}
        plan |= {f"model.layers.*.{name}_layernorm": norm for name in ("input", "post_attention")}
        plan |= {
            attention: PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            mlp: PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    parallelize_module(model, mesh["tp"], plan)
    for index, block in enumerate(model.model.layers):
        last = index == len(model.model.layers) - 1
        fully_shard(block, mesh=mesh["dp_shard"], reshard_after_forward=not last)
    return fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=False)


CONTENDERS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "ours": (ours, {}),
    "transformers": (by_transformers, {}),
    "by hand": (by_hand, {}),
    "ours, SP": (ours, {"sequence_parallel": True}),
    "by hand, SP": (by_hand, {"sequence_parallel": True}),
}
BEST_OF = {"ours": ("transformers", "by hand"), "ours, SP": ("by hand, SP",)}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    """One step; the loss."""
    optimizer.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def stream_bytes(model: nn.Module, ids: Tensor) -> int:
    """Bytes of hidden states that this rank holds between blocks in one forward."""
    structure, sizes = inspect_model(model), []

    def note(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        local = inputs[0].to_local() if isinstance(inputs[0], DTensor) else inputs[0]
        sizes.append(local.nbytes)

    handles = [structure.blocks[path].register_forward_pre_hook(note) for path in structure.decoder]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return sum(sizes)


def rank(index: int, store: str, folder: str, rounds: int) -> None:
    """What each process does; rank 0 prints."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=4)
    mesh = MeshSpec(dp_shard=2, tp=2).build(device_type="cpu")
    generator = torch.Generator().manual_seed(submesh(mesh, "dp").get_local_rank())
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    models = {name: build(Path(folder), mesh, **options) for name, (build, options) in CONTENDERS.items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}
    traffic, losses, streams = {}, {}, {}
    for name, model in models.items():  # warm-up, and what does not depend on the clock
        with RecordCollectives() as communication:
            losses[name] = step(model, optimizers[name], ids)
        traffic[name] = by_axis(communication.calls, mesh)
        streams[name] = stream_bytes(model, ids)
    medians = take_turns({name: partial(step, model, optimizers[name], ids) for name, model in models.items()}, rounds)
    if index == 0:
        show(medians, losses, traffic, streams)
    dist.destroy_process_group()


def show(medians: dict[str, list[float]], losses: Any, traffic: Any, streams: dict[str, int]) -> None:
    """Print the table."""
    for name, (clock, busy) in medians.items():
        print(f"{name:14} {clock * 1e3:6.0f} ms a step, {busy * 1e3:6.0f} ms of the processor, loss {losses[name]:.5f}")
        if others := [medians[other] for other in BEST_OF.get(name, ())]:
            best = [min(each) for each in zip(*others, strict=True)]
            print(
                f"    {clock / best[0]:.2f} of the best other on the clock, {busy / best[1]:.2f} of its processor time"
            )
        for axis, kinds in traffic[name].items():
            told = ", ".join(f"{count} {kind} of {size / 1e6:.1f} MB" for kind, (count, size) in kinds.items())
            print(f"    {axis:10} {told}")
    print(f"hidden states between blocks: {streams['ours']:,} bytes with TP, {streams['ours, SP']:,} with SP")


def main() -> None:
    """Write a checkpoint, start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config()).save_pretrained(folder)
        mp.spawn(rank, (f"{folder}/store", folder, arguments.rounds), nprocs=4)


if __name__ == "__main__":
    main()
