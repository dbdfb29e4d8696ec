"""The held-out score, and the proof that the saved checkpoint is the policy that earned it."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from batch import Sample
from report import Reloaded, Score
from rollout import Generator
from run import Run
from settings import Settings
from task import Question, draw_questions, reward
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT_SEED = 20_000
"""Seed of the held-out questions and of their samples: every score of every run asks the same."""


def held_out_questions(count: int) -> list[Question]:
    """The questions of the score; none of them, and none of their answers, is ever trained on."""
    return draw_questions(count, random.Random(HELD_OUT_SEED), held_out=True)


def score(run: Run, after: int) -> Score:
    """Let the generators answer the held-out questions with the trainer's present weights; collective.

    Args:
        run: The run.
        after: How many GRPO steps were taken; -1 before the warm-up.

    Returns:
        The score, the same on every rank.
    """
    run.generator.load(run.trainer.weights())
    questions = held_out_questions(run.settings.held_out)
    mine = questions[dist.get_rank() :: dist.get_world_size()]
    right = torch.tensor(right_answers(run.generator, mine, run.settings, dist.get_rank()), device=run.device)
    dist.all_reduce(right)
    shares = (right / len(questions)).tolist()
    return Score(after, sampled=shares[0], greedy=shares[1])


def right_answers(
    generator: Generator, questions: Sequence[Question], settings: Settings, rank: int
) -> tuple[float, float]:
    """How many questions a generator answers right: sampled, and with the likeliest tokens."""
    rng = torch.Generator(generator.device).manual_seed(HELD_OUT_SEED + rank)
    sampled = _answer(generator, questions, settings.max_new_tokens, 1.0, rng)
    greedy = _answer(generator, questions, settings.max_new_tokens, 0.0)
    return _right(generator, questions, sampled), _right(generator, questions, greedy)


def reload(run: Run, folder: Path) -> Reloaded:
    """Read a saved checkpoint as any user would, and compare its answers with those of this rank's generator.

    Args:
        run: The run; its generator holds the trained policy.
        folder: The saved checkpoint.

    Returns:
        The comparison over all held-out questions.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=run.generator.model.dtype)
    reloaded = Generator(model.to(run.device), AutoTokenizer.from_pretrained(folder))
    questions = held_out_questions(run.settings.held_out)
    expected, found = (
        _answer(generator, questions, run.settings.max_new_tokens, 0.0) for generator in (run.generator, reloaded)
    )
    return Reloaded(
        logprob_diff=max(map(_logprob_diff, expected, found)),
        greedy=_right(reloaded, questions, found) / len(questions),
    )


def _answer(
    generator: Generator,
    questions: Sequence[Question],
    max_new_tokens: int,
    temperature: float,
    rng: torch.Generator | None = None,
) -> list[Sample]:
    return generator.sample([question.prompt for question in questions], max_new_tokens, temperature, rng)


def _right(generator: Generator, questions: Sequence[Question], answers: Sequence[Sample]) -> float:
    """How many answers are right."""
    return sum(
        reward(question, generator.completion_text(answer)) for question, answer in zip(questions, answers, strict=True)
    )


def _logprob_diff(one: Sample, other: Sample) -> float:
    if one.completion != other.completion:
        return float("inf")
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
