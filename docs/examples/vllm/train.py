"""The GRPO example with vLLM as its generator: weights synced live after every step, samples over HTTP.

    torchrun --standalone --nproc-per-node 2 docs/examples/vllm/train.py --engine-python ENV/bin/python

The task, the trainer and the objective are those of the example in ``grpo``, imported from there, with its options.
"""

import math
import random
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

FOLDERS = [str(Path(__file__).parents[1] / "grpo"), str(Path(__file__).parent)]
sys.path[:0] = FOLDERS

import torch  # noqa: E402 (the folders come first)
import torch.distributed as dist  # noqa: E402
from checkpoint import find_checkpoint, write_checkpoint  # noqa: E402
from evaluate import held_out_questions, right_answers  # noqa: E402
from generator import VLLMGenerator  # noqa: E402
from grpo import improve, rewards_of  # noqa: E402
from report import Report, Score  # noqa: E402
from run import Run, check_divisible  # noqa: E402
from server import NAME, PORT, start_server, wait_for  # noqa: E402
from settings import Settings, parse_settings  # noqa: E402
from task import draw_questions  # noqa: E402
from trainer import Trainer  # noqa: E402
from transformers import AutoConfig, AutoTokenizer  # noqa: E402
from warmup import warm_up  # noqa: E402

import fsdp_runtime  # noqa: E402
from fsdp_runtime.sync import WeightSource  # noqa: E402
from vllm_gloo import EngineClient, EngineSync, EngineSyncReport  # noqa: E402

HEAD = " step  reward largest |ratio - 1| grad norm  engine  sync s  step s"


def main() -> None:
    """The run from start to end, on every rank."""
    own = ArgumentParser(add_help=False)
    own.add_argument("--engine-python", help="start a server with this interpreter")
    own.add_argument("--engine-url", help="or use a server that runs", default=f"http://127.0.0.1:{PORT}")
    own.add_argument("--engine-tp", type=int, default=1, help="tensor-parallel workers of a server that is started")
    where, others = own.parse_known_args()
    settings = parse_settings(others)
    run = set_up(settings)
    is_first, process, client = dist.get_rank() == 0, None, None
    if is_first:
        client = EngineClient(where.engine_url)
        if where.engine_python:
            log, tp = settings.output / "engine.log", where.engine_tp
            process = start_server(where.engine_python, settings.output / "initial", log, tp)
    try:
        warm_up(run)  # the server starts meanwhile
        run.trainer.reset_optimizer()
        if is_first:
            wait_for(client, process)
        dist.barrier()
        generator = VLLMGenerator(client, NAME, run.tokenizer) if is_first else None
        optimise(run, EngineSync(WeightSource(run.trainer.model), client), generator)
        run.trainer.save(settings.output / "tuned")
    finally:
        if process is not None:
            process.terminate()
            process.wait()
    dist.destroy_process_group()


def set_up(settings: Settings) -> Run:
    """Build the mesh, the checkpoint, and this rank's part of the trainer."""
    mesh = fsdp_runtime.MeshSpec(dp_shard=settings.dp_shard, tp=settings.tp).build(device_type="cpu")
    check_divisible(settings, world_size=1, dp_size=fsdp_runtime.submesh(mesh, "dp").size())
    if dist.get_rank() == 0 and settings.model is None:
        write_checkpoint(settings.output / "initial", settings.seed)
    dist.barrier()
    folder = settings.output / "initial" if settings.model is None else find_checkpoint(settings.model)
    sequence_parallel = settings.sequence_parallel and settings.tp > 1
    dtype = getattr(torch, settings.dtype)
    config = AutoConfig.from_pretrained(folder)
    return Run(
        settings=settings,
        mesh=mesh,
        device=torch.device("cpu"),
        trainer=Trainer(config, folder, mesh, dtype, sequence_parallel, settings.activation_checkpointing),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        generator=None,
        report=Report(visible=dist.get_rank() == 0),
        questions=random.Random(settings.seed),
        sampling=torch.Generator().manual_seed(settings.seed),
    )


def optimise(run: Run, sync: EngineSync, generator: VLLMGenerator | None) -> None:
    """Take the GRPO steps; the engine gets the new weights before each of them, and after the last."""
    settings, report = run.settings, run.report
    add_score(run, sync.update("step 0"), generator, after=0)
    report.say(HEAD)
    for step in range(settings.steps):
        start = time.perf_counter()
        synced = sync.update(f"step {step}") if step else None
        samples, rewards = sample_on_first_rank(run, generator)
        done = improve(run, samples, rewards, step)
        ratio = math.expm1(done.logprob_diff_max)
        version = f"{synced.version:>7} {synced.seconds:7.2f}" if synced else f"{'step 0':>7} {'':7}"
        seconds = time.perf_counter() - start
        report.say(f"{step + 1:5} {rewards.mean():7.3f} {ratio:19.1e} {done.grad_norm:9.2f} {version} {seconds:7.1f}")
    add_score(run, sync.update(f"step {settings.steps}"), generator, after=settings.steps)


def sample_on_first_rank(run: Run, generator: VLLMGenerator | None) -> tuple[list, torch.Tensor]:
    """Samples of every question and their rewards ``[prompts, group]``, on every rank."""
    settings = run.settings
    questions = draw_questions(settings.prompts, run.questions, held_out=False)
    drawn = [None, None]
    if generator is not None:
        prompts = [question.prompt for question in questions for _ in range(settings.group)]
        limit, temperature = settings.max_new_tokens, settings.temperature
        samples = generator.sample(prompts, limit, temperature, run.sampling, settings.top_p)
        drawn = [samples, rewards_of(questions, samples, generator)]
    dist.broadcast_object_list(drawn, src=0)
    return drawn[0], drawn[1]


def add_score(run: Run, synced: EngineSyncReport, generator: VLLMGenerator | None, after: int) -> None:
    """Score the present weights on the held-out questions."""
    run.report.say(f"the engine names version {synced.version!r}; sync {synced.seconds:.2f} s, {synced.nbytes:,} bytes")
    if generator is not None:
        questions = held_out_questions(run.settings.held_out)
        sampled, greedy = (right / len(questions) for right in right_answers(generator, questions, run.settings, 0))
        run.report.add_score(Score(after, sampled, greedy), f"after GRPO step {after}")
    dist.barrier()


if __name__ == "__main__":
    main()
