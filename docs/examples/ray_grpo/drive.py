"""The GRPO example with Ray actors: trainer ranks and a generator that exchange streamed weights.

    python docs/examples/ray_grpo/drive.py --dp-shard 1 --tp 2

The task, the trainer, the generator and the objective are those of the example in ``grpo``, imported from there; what
differs is who calls whom. ``--help`` lists what can be changed.
"""

import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

FOLDERS = [str(Path(__file__).parents[1] / "grpo"), str(Path(__file__).parent)]
sys.path[:0] = FOLDERS

import ray  # noqa: E402 (the folders come first)
from actors import GeneratorActor, TrainerActor  # noqa: E402
from checkpoint import find_checkpoint, write_checkpoint  # noqa: E402
from report import Report, Score  # noqa: E402
from settings import Settings, parse_settings  # noqa: E402
from task import draw_questions  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> None:
    """The run from start to end, as the driver of all actors."""
    settings = parse_settings(arguments)
    settings = replace(settings, output=settings.output.resolve(), dp_shard=max(1, settings.dp_shard))
    start_ray(settings.dp_shard * settings.tp + 1)
    checkpoint = settings.output / "initial"
    checkpoint = find_checkpoint(settings.model) if settings.model else write_checkpoint(checkpoint, settings.seed)
    report = Report(visible=True, every=settings.report_every)
    generator = GeneratorActor.remote(settings, checkpoint)
    trainers = start_trainers(settings, checkpoint)
    report.say(f"{len(trainers)} trainer ranks (dp_shard={settings.dp_shard}, tp={settings.tp}) and a generator")

    if settings.warmup_steps:
        on_all(trainers, "warm_up")
    add_score(report, trainers, generator, after=0)
    questions = random.Random(settings.seed + 1)
    for step in range(settings.steps):
        report.add_step(grpo_step(settings, trainers, generator, questions, step))
        if (step + 1) % settings.score_every == 0 or step + 1 == settings.steps:
            add_score(report, trainers, generator, after=step + 1)
    compare_weights(report, trainers, generator)
    on_all(trainers, "save", settings.output / "tuned")
    report.write(settings.output)
    on_all(trainers, "leave")
    ray.shutdown()


def start_ray(cpus: int) -> None:
    """Join the cluster that ``RAY_ADDRESS`` names, or begin one of this machine alone."""
    path = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
    alone = {} if "RAY_ADDRESS" in os.environ else {"address": "local", "include_dashboard": False, "num_cpus": cpus}
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}}, **alone)


def start_trainers(settings: Settings, checkpoint: Path) -> list[Any]:
    """The trainer's ranks, met and loaded."""
    world_size = settings.dp_shard * settings.tp
    trainers = [TrainerActor.remote(settings, checkpoint, rank, world_size) for rank in range(world_size)]
    on_all(trainers, "join", *ray.get(trainers[0].meeting_point.remote()))
    return trainers


def on_all(actors: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
    """Call a method on all actors at once and wait for all; the first error of one is raised here."""
    return ray.get([getattr(actor, method).remote(*arguments) for actor in actors])


def grpo_step(settings: Settings, trainers: list[Any], generator: Any, questions: random.Random, step: int) -> Any:
    """Weights to the generator, samples and rewards from it, and to all trainer ranks; the step's figures."""
    start = time.perf_counter()
    on_all(trainers, "stream_to", generator)
    asked = draw_questions(settings.prompts, questions, held_out=False)
    samples, rewards = ray.get(generator.sample.remote(asked))
    improvement, *_ = on_all(trainers, "improve", samples, rewards, step)
    return improvement.as_step(step, samples, rewards, time.perf_counter() - start)


def add_score(report: Report, trainers: list[Any], generator: Any, after: int) -> None:
    """Score the present weights on the held-out questions."""
    on_all(trainers, "stream_to", generator)
    sampled, greedy = ray.get(generator.score.remote())
    report.add_score(Score(after, sampled, greedy), f"after GRPO step {after}" if after else "before GRPO")


def compare_weights(report: Report, trainers: list[Any], generator: Any) -> None:
    """Prove that the generator holds what the trainer does.

    Raises:
        RuntimeError: A weight of the two differs in a bit.
    """
    on_all(trainers, "stream_to", generator)
    trained, *_ = on_all(trainers, "digests")
    held = ray.get(generator.digests.remote())
    if different := sorted(name for name in held if held[name] != trained.get(name)):
        raise RuntimeError(f"{len(different)} of {len(held)} weights differ, first {different[0]}")
    report.say(f"{len(held)} of {len(held)} weights are the same bit for bit in the trainer and the generator")


if __name__ == "__main__":
    main()
