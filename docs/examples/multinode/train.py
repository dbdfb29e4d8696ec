"""Training on several machines: the same file under torchrun, under Slurm's srun, and alone.

    torchrun --standalone --nproc-per-node 4 docs/examples/multinode/train.py --tp 2

Ranks of one node split the layers and shard the parameters; nodes hold replicas of that (HSDP), so that only one
gradient reduction a step crosses the network.  ``--shard-over-nodes`` shards over all nodes instead, for models that do
not fit into one.
"""

import argparse
import socket
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen3Config, Qwen3ForCausalLM

import fsdp_runtime
from fsdp_runtime.mesh import rank_info_from_env

VOCABULARY, BATCH, LENGTH = 256, 8, 32


def main(arguments: Sequence[str] | None = None) -> None:
    """Train for some steps and print every loss."""
    options = parse(arguments)
    launch = rank_info_from_env()
    print(f"rank {launch.rank} of {launch.world_size} on {socket.gethostname()}", flush=True)
    replicas = 1 if options.shard_over_nodes else options.nodes
    mesh = fsdp_runtime.MeshSpec(dp_replicate=replicas, dp_shard=-1, tp=options.tp).build()

    torch.manual_seed(0)  # the same weights on every rank
    model = fsdp_runtime.parallelize(small_model().to(mesh.device_type), mesh, sequence_parallel=True, logits="full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for step, tokens in enumerate(own_batches(options.steps, mesh), start=1):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        mean = mean_over_data_parallel(loss.detach(), mesh)
        if launch.rank == 0:
            print(f"step {step}: loss {mean:.5f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Training on several machines.")
    parser.add_argument("--nodes", type=int, default=1, help="machines; each holds a replica of the parameters")
    parser.add_argument("--tp", type=int, default=1, help="ranks that split each layer; a divisor of those of a node")
    parser.add_argument("--shard-over-nodes", action="store_true", help="shard parameters over all nodes")
    parser.add_argument("--steps", type=int, default=5, help="steps to take")
    return parser.parse_args(arguments)


def small_model() -> nn.Module:
    """A model of 0.1 million parameters; see the README of the repository for loading a real one from disk."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads))


def own_batches(count: int, mesh: DeviceMesh) -> Iterator[Tensor]:
    """This rank's rows of every batch, ``[rows, seq]``; ranks of one ``tp`` group get the same."""
    dp = fsdp_runtime.submesh(mesh, "dp")
    tokens = torch.Generator().manual_seed(1)
    for _ in range(count):
        starts = torch.randint(0, VOCABULARY, (BATCH, 1), generator=tokens)
        batch = (starts + torch.arange(LENGTH)) % VOCABULARY
        yield batch.chunk(dp.size())[dp.get_local_rank()].to(mesh.device_type)


def mean_over_data_parallel(value: Tensor, mesh: DeviceMesh) -> float:
    """The mean of a number of which each data-parallel rank has its own."""
    dp = fsdp_runtime.submesh(mesh, "dp")
    dist.all_reduce(value, group=dp.get_group())
    return value.item() / dp.size()


if __name__ == "__main__":
    main()
