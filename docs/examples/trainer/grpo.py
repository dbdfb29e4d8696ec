"""TRL's GRPOTrainer on two data-parallel times two tensor-parallel ranks.

torchrun --nproc-per-node=4 docs/examples/trainer/grpo.py
"""

import argparse

import tiny
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from fsdp_runtime import MeshSpec, load_weights, meta_device, parallelize
from fsdp_runtime.trainers import GRPOTrainer


def small_numbers(completions: list[str], **_: object) -> list[float]:
    """Return the share of words that are numbers below ten."""
    words = [text.split() for text in completions]
    return [sum(word.isdigit() and int(word) < 10 for word in row) / max(len(row), 1) for row in words]


def main() -> None:
    """Train and save; the mean reward of every step is printed as ``reward``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="out/grpo")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    mesh = MeshSpec(dp_shard=-1, tp=2).build()
    path = tiny.checkpoint()  # or the folder of a checkpoint of yours
    with meta_device():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    parallelize(model, mesh, sequence_parallel=True)
    load_weights(model, path)
    arguments = GRPOConfig(
        output_dir=options.output,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=8,
        learning_rate=1e-2,
        max_steps=options.steps,
        logging_steps=1,
        save_strategy="no",
        use_cpu=mesh.device_type == "cpu",
        bf16=False,
        disable_tqdm=True,  # one line a step instead
    )
    prompts = Dataset.from_list([{"prompt": f"{number} +"} for number in range(40)])
    data = {"train_dataset": prompts, "processing_class": AutoTokenizer.from_pretrained(path)}
    trainer = GRPOTrainer(model=model, mesh=mesh, args=arguments, reward_funcs=small_numbers, **data)
    trainer.train()
    trainer.save_model()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
