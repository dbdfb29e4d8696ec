"""``trl.GRPOTrainer`` on a mesh against the trainer of one process; run by ``nox -s trainers``."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset

from fsdp_runtime import OptionError, parallelize
from fsdp_runtime.trainers import GRPOTrainer
from harness.models import tiny_model
from harness.ranks import RankPool
from harness.trainers import (
    COMMON,
    Outcome,
    compare,
    differences,
    forget_accelerate,
    model_on,
    tokenizer,
    train,
    write_checkpoint,
)

MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2})
FIGURES = ("loss", "grad_norm", "reward", "reward_std", "entropy", "completions/mean_length", "num_tokens")
#: Completions of an optimizer step: two groups of four.
COMPLETIONS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def rows(count: int = 16) -> Dataset:
    return Dataset.from_list([{"prompt": " ".join(f"t{5 + i + j}" for j in range(1 + i % 3))} for i in range(count)])


def reward(completions: list[str], **_: Any) -> list[float]:
    """A reward that depends on every token."""
    return [float(zlib.crc32(text.encode()) % 100) / 100 for text in completions]


def made_up(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """Completions that depend on the prompt and the place in the batch of all processes, and on nothing else."""
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    completions = []
    for index, prompt in enumerate(prompts):
        place = trainer.accelerator.process_index * len(prompts) + index
        generator = torch.Generator().manual_seed(zlib.crc32(f"{prompt} {place} {trainer.state.global_step}".encode()))
        completions.append(torch.randint(4, 131, (2 + place % 4,), generator=generator).tolist())
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}


def build(model: Any, mesh: Any, dp: int, *, output: str, rollout: bool = True, ref: Any = None, **options: Any) -> Any:
    """A trainer of three steps, on a mesh or, for ``mesh=None``, TRL's own."""
    accumulation = options.get("gradient_accumulation_steps", 1)
    given = {
        **COMMON,
        "output_dir": output,
        "per_device_train_batch_size": COMPLETIONS // dp // accumulation,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "gradient_checkpointing": False,
    }
    common: dict[str, Any] = {
        "model": model,
        "args": trl.GRPOConfig(**{**given, **options}),
        "reward_funcs": reward,
        "train_dataset": rows(),
        "processing_class": tokenizer(),
        "rollout_func": made_up if rollout else None,
    }
    if mesh is None:
        return trl.GRPOTrainer(**common)
    if ref is not None:
        common["ref_model"] = model_on(ref, dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)))[0]
    return GRPOTrainer(**common, mesh=mesh)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_figures_and_weights_are_those_of_one_process_for_the_same_completions(
    two_ranks: RankPool, four_ranks: RankPool, folder: Path, tmp_path: Path, axes: dict[str, int]
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    found, expected = compare(pool, partial(build, output=str(tmp_path)), folder, axes, key="grpo")
    assert differences(found, expected, FIGURES) == {}
    assert found.wrapper.endswith("Qwen3ForCausalLM")


def test_tensor_parallel_ranks_sample_what_one_process_samples(
    two_ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    set_up = partial(build, output=str(tmp_path), rollout=False)
    found, expected = compare(two_ranks, set_up, folder, {"tp": 2}, key="grpo sampled")
    assert differences(found, expected, FIGURES) == {}


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence parallelism": ({"sequence_parallel": True}, {}),
    "accumulated gradients and several updates": (
        {},
        {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4},
    ),
    "activation checkpointing": ({}, {"gradient_checkpointing": True}),
    "a group's mean of sequences": ({}, {"loss_type": "grpo"}),
    "a reference that follows the policy": (
        {},
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    ),
    "a temperature and the entropy's quantile": ({}, {"temperature": 0.7, "top_entropy_quantile": 0.5}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_they_are_with_every_option(four_ranks: RankPool, folder: Path, tmp_path: Path, variant: str) -> None:
    parallel, options = VARIANTS[variant]
    set_up = partial(build, output=str(tmp_path), **options)
    found, expected = compare(
        four_ranks, set_up, folder, {"dp_shard": 2, "tp": 2}, parallel=parallel, key=f"grpo {options}"
    )
    # Which samples share a micro-batch depends on the ranks, and TRL's other figures are means over micro-batches.
    figures = FIGURES[:2] if "gradient_accumulation_steps" in options else FIGURES
    assert differences(found, expected, figures) == {}


def test_a_reference_model_on_the_same_mesh_gives_the_kl_of_one_process(
    four_ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    set_up = partial(build, output=str(tmp_path), ref=folder, beta=0.1)
    found, expected = compare(four_ranks, set_up, folder, {"dp_shard": 2, "tp": 2}, key="grpo kl")
    assert differences(found, expected, (*FIGURES, "kl")) == {}


class _Watched(GRPOTrainer):
    """Keeps the batches that it trains on."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        self.seen = [*getattr(self, "seen", []), {name: found[name] for name in ("completion_ids", "advantages")}]
        return found


def _noisy(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between processes."""
    return [float(torch.rand(())) + torch.distributed.get_rank() for _ in completions]


def _seen(folder: Path, output: Path, axes: dict[str, int], parallel: dict[str, Any]) -> Any:
    forget_accelerate()
    model, mesh = model_on(folder, axes, **parallel)
    arguments = {**COMMON, "output_dir": str(output), "per_device_train_batch_size": 4, "num_generations": 4}
    trainer = _Watched(
        model=model,
        mesh=mesh,
        args=trl.GRPOConfig(
            **arguments, max_completion_length=6, max_steps=2, gradient_checkpointing=False, log_completions=True
        ),
        reward_funcs=_noisy,
        train_dataset=rows(),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer.seen


@pytest.mark.parametrize("parallel", [{}, {"sequence_parallel": True}, {"logits": "full"}], ids=str)
def test_ranks_of_one_tp_group_train_on_the_same_completions_and_rewards(
    four_ranks: RankPool, folder: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    first, second, third, fourth = four_ranks.run(
        _seen, folder, tmp_path, {"dp_shard": 2, "tp": 2}, parallel, timeout=400
    )
    for own, neighbour in ((first, second), (third, fourth)):
        for batch, same in zip(own, neighbour, strict=True):
            assert all(torch.equal(value, same[name]) for name, value in batch.items())
    assert any(
        a["completion_ids"].shape != b["completion_ids"].shape or (a["completion_ids"] != b["completion_ids"]).any()
        for a, b in zip(first, third, strict=True)
    )


def _resumed(folder: Path, output: Path, axes: dict[str, int]) -> tuple[Outcome, Outcome]:
    saving = {"save_strategy": "steps", "save_steps": 1, "output": str(output), "rollout": False}
    whole = train(partial(build, **saving), folder, axes)
    resumed = train(partial(build, **saving), folder, axes, resume=str(output / "checkpoint-2"))
    return whole, resumed


def test_a_resumed_run_is_the_uninterrupted_one(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    whole, resumed = two_ranks.run(_resumed, folder, tmp_path, {"tp": 2}, timeout=400)[0]
    assert differences(resumed, whole) == {}


def _refusals(folder: Path, output: Path) -> list[str]:
    forget_accelerate()
    model, mesh = model_on(folder, {"tp": 2})
    adapted = peft.get_peft_model(tiny_model("Qwen3ForCausalLM"), peft.LoraConfig(target_modules=["q_proj"]))
    parallelize(adapted, mesh)
    failures = []
    base = {"output_dir": str(output), "use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": False}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("vllm_mode=", {"use_vllm": True, "vllm_mode": "colocate"}, {}),
        ("cast_lm_head_to_fp32", {"cast_lm_head_to_fp32": True}, {}),
        ("before parallelize", {"beta": 0.1}, {"model": adapted}),
        ("tp=2", {}, {"tools": [max]}),
        ("does not divide", {"per_device_train_batch_size": 2, "num_generations": 4}, {}),
        ("choose a multiple", {"per_device_eval_batch_size": 12}, {"eval_dataset": rows(8)}),
    ]
    for words, options, given in cases:
        arguments = trl.GRPOConfig(**{**base, **options})
        try:
            common = {"model": model, "mesh": mesh, "reward_funcs": reward, "train_dataset": rows()}
            GRPOTrainer(args=arguments, **{**common, **given})
        except OptionError as error:
            if words not in str(error):
                failures.append(f"{words}: {error}")
        else:
            failures.append(f"{words}: accepted")
    later = trl.GRPOConfig(**{**base, "per_device_eval_batch_size": 12})
    trainer = GRPOTrainer(model=model, mesh=mesh, args=later, reward_funcs=reward, train_dataset=rows())
    with pytest.raises(OptionError, match="choose a multiple"):
        trainer.evaluate(rows(8))
    forget_accelerate()
    over_cp, mesh = model_on(folder, {"cp": 2})
    given = {"args": trl.GRPOConfig(**base), "reward_funcs": reward, "train_dataset": rows(), "tools": [max]}
    with pytest.raises(OptionError, match="every rank of cp=2"):
        GRPOTrainer(model=over_cp, mesh=mesh, **given)
    return failures


def test_what_cannot_be_right_is_refused_with_the_fix(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    assert two_ranks.run(_refusals, folder, tmp_path) == [[], []]
