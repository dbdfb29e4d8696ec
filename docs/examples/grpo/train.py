"""Group-relative policy optimisation of a sharded policy, from a checkpoint on disk to a better one.

    torchrun --standalone --nproc-per-node 4 docs/examples/grpo/train.py

trains a small Qwen3 on four CPU ranks; ``--help`` lists what can be changed.
"""

import random
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint import MIXTURE, find_checkpoint, write_checkpoint
from evaluate import reload, score
from grpo import grpo_step
from report import Report
from rollout import Generator
from run import Run, check_divisible
from settings import Settings, parse_settings
from torch.distributed.elastic.multiprocessing.errors import record
from trainer import Trainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar
from warmup import warm_up

import fsdp_runtime


# Without this, torchrun's closing summary does not name the error of the rank that failed first.
@record
def main() -> None:
    """The run from start to end, on every rank."""
    start = time.perf_counter()
    settings = parse_settings()
    quieten()
    run = set_up(settings)

    run.report.add_score(score(run, after=-1), "before warm-up")
    if settings.warmup_steps:
        warm_up(run)
        run.report.add_score(score(run, after=0), "after warm-up")
    optimise(run)
    save_and_reload(run)

    run.report.say(f"wrote {settings.output} in {time.perf_counter() - start:.0f} s")
    dist.barrier()
    dist.destroy_process_group()


def quieten() -> None:
    """Keep other libraries' bars, and warnings that torch raises about its own code, out of the report."""
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")


def set_up(settings: Settings) -> Run:
    """Build the mesh, the checkpoint, and on every rank its part of the trainer and its generator."""
    device_type = None if settings.device == "auto" else settings.device
    mesh = fsdp_runtime.MeshSpec(dp_shard=settings.dp_shard, tp=settings.tp, ep=settings.ep).build(
        device_type=device_type
    )
    rank, dp_size = dist.get_rank(), fsdp_runtime.submesh(mesh, "dp").size()
    check_divisible(settings, dist.get_world_size(), dp_size)
    device = torch.device(mesh.device_type)
    dtype = getattr(torch, settings.dtype)
    sequence_parallel = settings.sequence_parallel and settings.tp > 1

    folder = prepare_checkpoint(settings)
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    with device:
        generator = Generator(AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer)
    run = Run(
        settings=settings,
        mesh=mesh,
        device=device,
        trainer=Trainer(
            config, folder, mesh, dtype, sequence_parallel, settings.activation_checkpointing, settings.float8
        ),
        tokenizer=tokenizer,
        generator=generator,
        report=Report(visible=rank == 0, every=settings.report_every),
        questions=random.Random(settings.seed),
        sampling=torch.Generator(device).manual_seed(settings.seed + rank),
    )
    parameters = sum(parameter.numel() for parameter in generator.model.parameters())
    run.report.say(
        f"{type(generator.model).__name__}, {parameters:,} parameters, {settings.dtype}, on {device.type}: "
        f"dp_shard={dp_size}, tp={settings.tp}, sequence parallelism {'on' if sequence_parallel else 'off'}"
    )
    return run


def prepare_checkpoint(settings: Settings) -> Path:
    """The folder of the checkpoint to start from, written by one rank where the user names none."""
    if settings.model not in (None, MIXTURE):
        return find_checkpoint(settings.model)
    folder = settings.output / "initial"
    if dist.get_rank() == 0:
        write_checkpoint(folder, settings.seed, mixture=settings.model == MIXTURE)
    dist.barrier()
    return folder


def optimise(run: Run) -> None:
    """Take the GRPO steps, with a held-out score every few of them."""
    settings, report = run.settings, run.report
    run.trainer.reset_optimizer()
    with report.progress("GRPO", settings.steps) as bar:
        for step in range(settings.steps):
            figures = grpo_step(run, step)
            report.add_step(figures)
            bar.advance(f"reward {figures.reward:.2f}")
            done = step + 1
            if done % settings.score_every == 0 or done == settings.steps:
                report.add_score(score(run, after=done), f"after GRPO step {done}")


def save_and_reload(run: Run) -> None:
    """Save the tuned policy and everything reported, and let one rank prove that the checkpoint loads."""
    output = run.settings.output
    run.trainer.save(output / "tuned")
    if dist.get_rank() == 0:
        run.tokenizer.save_pretrained(output / "tuned")
        run.report.add_reload(reload(run, output / "tuned"))
        run.report.write(output)


if __name__ == "__main__":
    main()
