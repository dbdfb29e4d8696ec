"""A loop on accelerate, on two data-parallel times two tensor-parallel ranks.

torchrun --nproc-per-node=4 docs/examples/trainer/loop.py
"""

import argparse

import tiny
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from train import counting
from transformers import AutoModelForCausalLM

from fsdp_runtime import MeshSpec
from fsdp_runtime.trainers import MeshAccelerator


def main() -> None:
    """Train, save the state half-way, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="out/loop")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    mesh = MeshSpec(dp_shard=-1, tp=2).build()
    accelerator = MeshAccelerator(mesh, parallelize_kwargs={"sequence_parallel": True}, gradient_accumulation_steps=2)
    model = AutoModelForCausalLM.from_pretrained(tiny.checkpoint())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = [{name: torch.tensor(value) for name, value in row.items()} for row in counting(1024)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4, shuffle=True))
    step = 0
    while step < options.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            mean = accelerator.reduce(loss.detach(), "mean")
            if step % 5 == 0:
                accelerator.print({"loss": f"{mean.item():.3f}", "step": step})
            if step == options.steps // 2:
                accelerator.save_state(f"{options.output}/state")
            if step == options.steps:
                break
    accelerator.save_model(model, options.output)
    accelerator.print("saved:", AutoModelForCausalLM.from_pretrained(options.output).config.architectures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
