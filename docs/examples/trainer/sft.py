"""TRL's SFTTrainer on two data-parallel times two tensor-parallel ranks.

torchrun --nproc-per-node=4 docs/examples/trainer/sft.py
"""

import argparse
import random

import tiny
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from fsdp_runtime import MeshSpec, load_weights, meta_device, parallelize
from fsdp_runtime.trainers import SFTTrainer


def sums(count: int) -> Dataset:
    """Sums of two numbers, as prompts and completions."""
    rng = random.Random(0)
    pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in pairs])


def main() -> None:
    """Train, evaluate and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="out/sft")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    mesh = MeshSpec(dp_shard=-1, tp=2).build()
    path = tiny.checkpoint()  # or the folder of a checkpoint of yours
    with meta_device():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    parallelize(model, mesh, sequence_parallel=True)
    load_weights(model, path)
    arguments = SFTConfig(
        output_dir=options.output,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        max_steps=options.steps,
        logging_steps=5,
        save_strategy="no",
        use_cpu=mesh.device_type == "cpu",
        bf16=False,
        disable_tqdm=True,  # one line every five steps instead
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    data = {"train_dataset": sums(1024), "eval_dataset": sums(64), "processing_class": tokenizer}
    trainer = SFTTrainer(model=model, mesh=mesh, args=arguments, **data)
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
