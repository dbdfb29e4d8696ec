"""A bare training loop over a Hugging Face model: a plan, and torch's own function to apply it.

torchrun --standalone --nproc-per-node 2 docs/examples/foreign_trainers/bare_loop.py
"""

import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import Qwen3Config, Qwen3ForCausalLM

import tp_plans

VOCABULARY = 131  # divides by no number of ranks


def main() -> None:
    """Train a small model to count upwards, split over all ranks of the job."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # the same model on every rank
    model = split(small_model().to(device), mesh, sequence_parallel=True)
    losses = train(model, batches(20, device), lr=1e-2)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps on {mesh.size()} ranks")
    dist.destroy_process_group()


def small_model() -> nn.Module:
    """Any model of which there is a plan."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads))


def split(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> nn.Module:
    """The model with its parameters split over the mesh's one axis; all else of it stays as it was."""
    plan = tp_plans.plan_for(model, sequence_parallel=sequence_parallel)
    tp_plans.check(plan, model, tp=mesh.size()).raise_on_error()
    return parallelize_module(model, mesh, plan.to_torch())


def train(model: nn.Module, data: Iterable[Tensor], *, lr: float) -> list[float]:
    """Take one step on each batch; the loop does not know whether the model is split.

    Args:
        model: a causal language model of transformers.
        data: tokens, ``[batch, seq]`` each; the same on every rank.
        lr: the learning rate.

    Returns:
        The loss of every step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    losses = []
    for tokens in data:
        optimizer.zero_grad()
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of every token but the first, in nats."""
    logits = model(tokens, use_cache=False).logits
    if isinstance(logits, DTensor):  # split on the vocabulary
        logits = logits.full_tensor()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batches(count: int, device: str) -> Iterator[Tensor]:
    """Runs of 17 numbers that count upwards from random ones, ``[8, 17]``."""
    starts = torch.randint(0, VOCABULARY, (count, 8, 1), generator=torch.Generator().manual_seed(1))
    yield from ((starts + torch.arange(17)) % VOCABULARY).to(device)


if __name__ == "__main__":
    main()
