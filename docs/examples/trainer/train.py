"""transformers' Trainer on two data-parallel times two tensor-parallel ranks.

torchrun --nproc-per-node=4 docs/examples/trainer/train.py
"""

import argparse
import random

import tiny
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from fsdp_runtime import MeshSpec, load_weights, meta_device, parallelize
from fsdp_runtime.trainers import Trainer


def counting(count: int) -> list[dict[str, list[int]]]:
    """Numbers that count upwards from a random start; a model that has learned to count predicts all but the first."""
    rng = random.Random(0)
    first = len(tiny.WORDS) - 40
    starts = [rng.randrange(28) for _ in range(count)]
    rows = [[first + start + offset for offset in range(12)] for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train, save, and read the saved model back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="out/trainer")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    mesh = MeshSpec(dp_shard=-1, tp=2).build()
    path = tiny.checkpoint()  # or the folder of a checkpoint of yours
    with meta_device():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    parallelize(model, mesh, sequence_parallel=True)
    load_weights(model, path)
    arguments = TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        max_steps=options.steps,
        logging_steps=5,
        save_strategy="no",
        use_cpu=mesh.device_type == "cpu",
        disable_tqdm=True,  # one line every five steps instead
    )
    trainer = Trainer(model=model, mesh=mesh, args=arguments, train_dataset=counting(512))
    trainer.train()
    trainer.save_model()
    if dist.get_rank() == 0:
        print("saved:", AutoModelForCausalLM.from_pretrained(options.output).config.architectures, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
