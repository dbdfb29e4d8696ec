"""TRL's trainers with data of words, for tests on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trl
from datasets import Dataset
from transformers import LogitsProcessor
from trl.experimental import gkd, gmpo

from fsdp_runtime.trainers import on_mesh
from fsdp_runtime.trainers.distillation import divergence_loss
from harness.models import VOCAB
from harness.trainers import BATCH, COMMON, tokenizer

#: Completions of every prompt, two each.
SAMPLED = 2


def _words(generator: torch.Generator, number: int) -> str:
    return " ".join(f"t{index}" for index in torch.randint(4, VOCAB, (number,), generator=generator).tolist())


def _rows(row: Callable[[Callable[[int], str], int], dict[str, Any]], count: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    return Dataset.from_list([row(partial(_words, generator), index) for index in range(count)])


def preferences() -> Dataset:
    """Prompts with a chosen and a rejected completion, of several lengths."""
    return _rows(
        lambda words, i: {"prompt": words(2 + i % 3), "chosen": " " + words(3 + i % 4), "rejected": " " + words(5)}
    )


def judged() -> Dataset:
    """Prompts with a completion that is wanted or not."""
    return _rows(lambda words, i: {"prompt": words(2), "completion": " " + words(3 + i % 4), "label": i % 3 > 0})


def texts() -> Dataset:
    return _rows(lambda words, i: {"prompt": words(2 + i % 3), "completion": " " + words(4 + i % 5)})


def prompts() -> Dataset:
    return _rows(lambda words, i: {"prompt": words(2 + i % 3)})


def conversations() -> Dataset:
    def row(words: Callable[[int], str], i: int) -> dict[str, Any]:
        asked, answered = words(2 + i % 3), words(4 + i % 5)
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}

    return _rows(row)


def greedy(**more: Any) -> dict[str, Any]:
    """Settings under which sampling draws the same tokens on every mesh."""
    return {"max_completion_length": 6, "generation_kwargs": {"do_sample": False}, **more}


class _SecondChoice(LogitsProcessor):
    """Lets the samples of every other place in the batch of all ranks begin with their second best token."""

    def __init__(self) -> None:
        self.begun = False

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not self.begun:
            first = len(scores) * (dist.get_rank() if dist.is_initialized() else 0)  # odd only where a rank has one
            scores[(first + 1) % SAMPLED :: SAMPLED].scatter_(
                1, scores[(first + 1) % SAMPLED :: SAMPLED].argmax(1, keepdim=True), float("-inf")
            )
        self.begun = True
        return scores


def sample_apart(model: Any) -> None:
    """Let greedy completions of one prompt differ, so that their advantages do not cancel, alike on every mesh."""
    generate = model.generate
    model.generate = lambda *args, **given: generate(*args, logits_processor=[_SecondChoice()], **given)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(int(word[1:]) for word in text.split() if word[1:].isdigit()) / 100 for text in completions]


def trainers() -> dict[str, tuple[type, type, Callable[[], Dataset], dict[str, Any], dict[str, Any], tuple[str, ...]]]:
    """By name: the class, its config's, the data, settings, other arguments, and figures that are compared."""
    rewarded = (
        prompts,
        greedy(num_generations=SAMPLED, beta=0.1),
        {"reward_funcs": reward},
        ("reward", "kl", "entropy"),
    )
    return {
        "SFT": (trl.SFTTrainer, trl.SFTConfig, texts, {}, {}, ("entropy", "mean_token_accuracy", "num_tokens")),
        "DPO": (
            trl.DPOTrainer,
            trl.DPOConfig,
            preferences,
            {"use_weighting": True},
            {},
            ("entropy", "rewards/margins", "logps/chosen", "logits/chosen", "logits/rejected", "mean_token_accuracy"),
        ),
        "KTO": (
            trl.KTOTrainer,
            trl.KTOConfig,
            judged,
            {},
            {},
            ("kl", "logps/chosen", "rewards/chosen", "logits/chosen"),
        ),
        "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, *rewarded),
        "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, *rewarded),
        "Reward": (trl.RewardTrainer, trl.RewardConfig, preferences, {}, {}, ("accuracy", "margin", "mean_reward")),
        "Distillation": (
            trl.DistillationTrainer,
            trl.DistillationConfig,
            prompts,
            greedy(),
            {"teacher_model": None},
            ("entropy",),
        ),
        "GKD": (gkd.GKDTrainer, gkd.GKDConfig, conversations, {"lmbda": 0.0}, {"teacher_model": None}, ()),
        "GMPO": (gmpo.GMPOTrainer, gmpo.GMPOConfig, *rewarded),
    }


def build(model: Any, mesh: Any, dp: int, *, name: str, output: str, teacher: Any = None, **options: Any) -> Any:
    """A trainer of two steps, on a mesh or, for ``mesh=None``, TRL's own."""
    cls, config, data, settings, others, _ = trainers()[name]
    given = {
        **COMMON,
        "output_dir": output,
        "per_device_train_batch_size": BATCH // dp,
        "per_device_eval_batch_size": BATCH // dp,
        "max_steps": 2,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        **settings,
        **options,
    }
    more = {key: options[key] for key in ("peft_config", "parallelize_kwargs") if key in options}
    given = {key: value for key, value in given.items() if key in config.__dataclass_fields__ or key in COMMON}
    common = {
        "model": model,
        "args": config(**given),
        "train_dataset": data(),
        "eval_dataset": data() if "eval_strategy" in options else None,
        "processing_class": tokenizer(),
        **more,
        **{key: teacher if key == "teacher_model" else value for key, value in others.items()},
    }
    trainer = alone(cls, common) if mesh is None else on_mesh(cls)(**common, mesh=mesh)
    if "reward_funcs" in others:
        sample_apart(trainer.model)
    return trainer


def alone(cls: Any, arguments: dict[str, Any]) -> Any:
    """TRL's own trainer in one process, which needs no Triton."""
    trainer = without_triton()(cls)(**arguments)
    for name in ("train", "evaluate"):
        setattr(trainer, name, without_triton()(getattr(trainer, name)))
    return trainer


class _LogProbs:
    """What TRL 1.15 computes by Triton kernels, from full logits."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        temperature: float,
        chunk: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        assert softcap is None  # of no model of the tests
        logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale / temperature
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(-1, labels[:, None])[:, 0]
        found = {
            "entropy": -(logprobs.exp() * logprobs).sum(-1),
            "log_sum_sq_probs": (2 * logprobs.detach()).logsumexp(-1),
            "mean_logits": logits.detach().mean(-1),
            "is_top1": logits.argmax(-1) == labels,
        }
        return own, *(value if name in outputs else None for name, value in found.items())


@contextmanager
def without_triton() -> Iterator[None]:
    """Let TRL 1.15, whose losses in one process need Triton, compute them by torch; distillation's by ours."""
    with pytest.MonkeyPatch.context() as patch:
        if trl.__version__.startswith("1.15."):
            patch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", _LogProbs)
            patch.setattr(trl.trainer.distillation_trainer, "_chunked_divergence_loss", divergence_loss)
        yield
