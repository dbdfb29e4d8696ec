"""TRL's trainers on a mesh against those of one process, with dense models and mixtures; run by ``nox -s trainers``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

from fsdp_runtime.trainers import on_mesh
from harness.models import VOCAB
from harness.ranks import RankPool
from harness.trainers import BATCH, COMMON, Outcome, compare, differences, tokenizer, write_checkpoint

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


def greedy(**more: Any) -> dict[str, Any]:
    """Settings under which sampling draws the same tokens on every mesh."""
    return {"max_completion_length": 6, "generation_kwargs": {"do_sample": False}, **more}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(int(word[1:]) for word in text.split() if word[1:].isdigit()) / 100 for text in completions]


def trainers() -> dict[str, tuple[type, type, Callable[[], Dataset], dict[str, Any], dict[str, Any], tuple[str, ...]]]:
    """By name: the class, its config's, the data, settings, other arguments, and figures that are compared."""
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
        "RLOO": (
            trl.RLOOTrainer,
            trl.RLOOConfig,
            prompts,
            greedy(num_generations=SAMPLED, beta=0.1),
            {"reward_funcs": reward},
            ("reward", "kl", "entropy"),
        ),
        "GRPO": (
            trl.GRPOTrainer,
            trl.GRPOConfig,
            prompts,
            greedy(num_generations=SAMPLED, beta=0.1),
            {"reward_funcs": reward},
            ("reward", "kl", "entropy"),
        ),
        "Reward": (trl.RewardTrainer, trl.RewardConfig, preferences, {}, {}, ("accuracy", "margin", "mean_reward")),
        "Distillation": (
            trl.DistillationTrainer,
            trl.DistillationConfig,
            prompts,
            greedy(),
            {"teacher_model": None},
            ("entropy",),
        ),
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
    given = {key: value for key, value in given.items() if key in config.__dataclass_fields__ or key in COMMON}
    common = {
        "model": model,
        "args": config(**given),
        "train_dataset": data(),
        "processing_class": tokenizer(),
        **{key: teacher if key == "teacher_model" else value for key, value in others.items()},
    }
    return cls(**common) if mesh is None else on_mesh(cls)(**common, mesh=mesh)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scoring")
    return write_checkpoint(folder, architecture="Qwen3ForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mixture"), architecture="Qwen3MoeForCausalLM")


def _compare(
    pool: RankPool, name: str, folder: Path, axes: dict[str, int], output: Path, **options: Any
) -> tuple[Outcome, Outcome, tuple[str, ...]]:
    set_up = partial(build, name=name, output=str(output), teacher=str(folder), **options)
    found, expected = compare(pool, set_up, folder, axes, key=f"{name} {folder} {options}")
    return found, expected, ("loss", "grad_norm", *trainers()[name][-1])


MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", trainers())
def test_losses_norms_and_weights_are_those_of_one_process(
    two_ranks: RankPool,
    four_ranks: RankPool,
    dense: Path,
    scoring: Path,
    tmp_path: Path,
    name: str,
    axes: dict[str, int],
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    found, expected, figures = _compare(pool, name, scoring if name == "Reward" else dense, axes, tmp_path)
    assert differences(found, expected, figures) == {}


@pytest.mark.parametrize("axes", [{"tp": 2, "ep": 2}, {"dp_shard": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO"])
def test_they_are_with_experts_divided_over_ranks(
    two_ranks: RankPool, mixture: Path, tmp_path: Path, name: str, axes: dict[str, int]
) -> None:
    # The auxiliary loss is that of each rank's own batch, as under DDP; over dp it is not that of one process.
    options = {"router_aux_loss_coef": 0.0} if "dp_shard" in axes else {}
    found, expected, figures = _compare(two_ranks, name, mixture, axes, tmp_path, **options)
    assert differences(found, expected, figures) == {}


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO"])
def test_they_are_with_sequences_divided_over_ranks(
    four_ranks: RankPool, dense: Path, tmp_path: Path, name: str
) -> None:
    found, expected, figures = _compare(four_ranks, name, dense, {"cp": 2, "tp": 2}, tmp_path)
    assert differences(found, expected, figures) == {}
