"""One GRPO step: stream weights, sample, reward, recompute log-probs, update."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from batch import Batch, Sample, chunks, collate, padded_length
from objective import advantages_of, policy_loss
from report import Step
from rollout import Generator
from run import Run, mean_and_max, scheduled
from task import Question, draw_questions, reward

import rl_logprobs
from rl_logprobs.drift.report import DriftReport


def grpo_step(run: Run, step: int) -> Step:
    """Improve the policy by what one batch of its own samples earns.

    Args:
        run: The run.
        step: Counted from zero.

    Returns:
        The step's figures.
    """
    settings, start = run.settings, time.perf_counter()
    run.generator.load(run.trainer.weights())
    questions = draw_questions(settings.prompts, run.questions, held_out=False)
    samples = _sample_on_all_ranks(run, questions)
    rewards = rewards_of(questions, samples, run.generator)
    improvement = improve(run, samples, rewards, step)
    return improvement.as_step(step, samples, rewards, time.perf_counter() - start)


def rewards_of(questions: Sequence[Question], samples: Sequence[Sample], generator: Generator) -> torch.Tensor:
    """``[prompts, group]``: the reward of every sample, those of one question in a row."""
    return torch.tensor(
        [
            [reward(question, generator.completion_text(sample)) for sample in group]
            for question, group in zip(questions, chunks(samples, len(questions)), strict=True)
        ]
    )


@dataclass(frozen=True)
class Improvement:
    """The trainer's figures of one step.

    Attributes:
        logprob_diff_mean: As in ``Step``.
        logprob_diff_max: As in ``Step``.
        grad_norm: As in ``Step``.
    """

    logprob_diff_mean: float
    logprob_diff_max: float
    grad_norm: float

    def as_step(self, step: int, samples: Sequence[Sample], rewards: torch.Tensor, seconds: float) -> Step:
        """The figures of the whole step, which is counted from zero."""
        tokens = sum(len(sample.prompt) + len(sample.completion) for sample in samples)
        return Step(step + 1, rewards.mean().item(), **asdict(self), tokens_per_second=tokens / seconds)


def improve(run: Run, samples: Sequence[Sample], rewards: torch.Tensor, step: int) -> Improvement:
    """Update the policy from samples of its own; collective, with the same arguments on every rank.

    Args:
        run: The run.
        samples: Those of all prompts, group by group.
        rewards: ``[prompts, group]``.
        step: Counted from zero.

    Returns:
        The figures of the updates, the same on every rank.
    """
    settings = run.settings
    updates = chunks(samples, settings.updates)
    advantages = [part.to(run.device) for part in _my_rows(run, advantages_of(rewards))]
    batches = [_my_batch(run, update) for update in updates]
    if settings.explain_drift and step == 0:
        run.report.add_drift(drift(run, batches[0]))
    old_logprobs = run.trainer.frozen_logprobs(batches, settings.temperature)
    differences = [(old - batch.logprobs)[batch.mask].abs() for old, batch in zip(old_logprobs, batches, strict=True)]
    mean_difference, max_difference = mean_and_max(torch.cat(differences))

    norms = []
    for batch, old, advantage in zip(batches, old_logprobs, advantages, strict=True):
        weights = rl_logprobs.mean_weights(batch.mask, mesh=run.mesh)
        logprobs = run.trainer.logprobs(batch, settings.temperature)
        loss = policy_loss(logprobs, old, batch, advantage, weights, settings.clip)
        lr = scheduled(settings.lr, step, settings.steps)
        norms.append(run.trainer.step(loss, lr, settings.max_grad_norm))

    return Improvement(mean_difference, max_difference, torch.stack(norms).mean().item())


def drift(run: Run, batch: Batch) -> DriftReport:
    """Which of the generator's doings a trainer has to take over for equal log-probs, and what each moves; collective.

    Args:
        run: The run.
        batch: This rank's part of some samples.

    Returns:
        The report, the same on every rank.
    """

    def score(
        kept_tokens: rl_logprobs.KeptTokens | None = None, routes: torch.Tensor | None = None, temperature: float = 1.0
    ) -> torch.Tensor:
        (found,) = run.trainer.frozen_logprobs([replace(batch, kept_tokens=kept_tokens, routes=routes)], temperature)
        return found

    candidates = {
        "kept tokens": {"kept_tokens": batch.kept_tokens},
        "routes": {"routes": batch.routes},
        "temperature": {"temperature": run.settings.temperature},
    }
    present = {
        name: keywords for name, keywords in candidates.items() if all(value is not None for value in keywords.values())
    }
    # What float32 rounds differently needs no explanation.
    return rl_logprobs.explain_drift(
        batch.logprobs, score, present, mask=batch.mask, tolerance=1e-5, group=run.dp_group
    )


def _sample_on_all_ranks(run: Run, questions: Sequence[Question]) -> list[Sample]:
    """Every rank samples whole groups for its share of the questions; all ranks then hold all samples, in order."""
    world_size = dist.get_world_size()
    mine = chunks(questions, world_size)[dist.get_rank()]
    prompts = [question.prompt for question in mine for _ in range(run.settings.group)]
    settings = run.settings
    sampled = run.generator.sample(prompts, settings.max_new_tokens, settings.temperature, run.sampling, settings.top_p)
    gathered: list[list[Sample]] = [[] for _ in range(world_size)]
    dist.all_gather_object(gathered, sampled)
    return [sample for part in gathered for sample in part]


def _my_batch(run: Run, update: Sequence[Sample]) -> Batch:
    """This rank's part of an update's samples, padded to a length that all ranks agree on."""
    mine = chunks(update, run.dp_size)[run.dp_rank]
    return collate(mine, padded_length(update), run.tokenizer.pad_token_id, run.device)


def _my_rows(run: Run, values: torch.Tensor) -> list[torch.Tensor]:
    """This rank's part of one value for each sample, for each update."""
    return list(values.view(run.settings.updates, run.dp_size, -1)[:, run.dp_rank])
