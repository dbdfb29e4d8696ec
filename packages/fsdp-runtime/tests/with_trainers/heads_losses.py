"""Trainers add the loss of multi-token heads as one process does; run by ``nox -s trainers``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor

from coverage.table import coverage_entries, tiny_model
from fsdp_runtime import OptionError, stream_weights
from fsdp_runtime.steps import MultiTokenHeads
from fsdp_runtime.trainers import GRPOTrainer, SFTTrainer, Trainer
from harness.parity import largest, mesh_for
from harness.ranks import RankPool
from harness.trainers import BATCH, COMMON, dp_size, forget_accelerate, token_rows, tokenizer

FACTOR = 0.3
CONFIGS = {"Trainer": transformers.TrainingArguments, "SFTTrainer": trl.SFTConfig, "GRPOTrainer": trl.GRPOConfig}


class _Plain:
    """Adds the loss of the heads in one process, by hand."""

    heads: MultiTokenHeads

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.heads.num_items_in_batch = num_items_in_batch
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        further = FACTOR * self.heads.loss
        return (loss[0] + further, *loss[1:]) if isinstance(loss, tuple) else loss + further


class _PlainTrainer(_Plain, transformers.Trainer):
    pass


class _PlainSFTTrainer(_Plain, trl.SFTTrainer):
    pass


def _trainer(kind: str, output: Path, axes: Mapping[str, int] | None, **options: Any) -> Any:
    forget_accelerate()
    model = tiny_model(coverage_entries()["glm4_moe"], dtype=torch.float32)
    heads = MultiTokenHeads(model, 2, loss_scaling_factor=FACTOR)
    common = {
        "model": model,
        "args": CONFIGS[kind](
            **{**COMMON, "output_dir": str(output), "max_steps": 3, "gradient_accumulation_steps": 2, **options},
            per_device_train_batch_size=BATCH // dp_size(axes) // 2,
        ),
        "train_dataset": Dataset.from_list(token_rows()),
        "processing_class": tokenizer(),
    }
    if kind == "Trainer":
        common["data_collator"] = transformers.default_data_collator
    if axes is None:
        trainer = {"Trainer": _PlainTrainer, "SFTTrainer": _PlainSFTTrainer}[kind](**common)
        trainer.heads = heads
        return trainer
    extra = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if kind == "GRPOTrainer" else {}
    of = {"Trainer": Trainer, "SFTTrainer": SFTTrainer, "GRPOTrainer": GRPOTrainer}
    return of[kind](**common, **extra, mesh=mesh_for(axes))


def _trained(kind: str, output: Path, axes: Mapping[str, int] | None) -> tuple[list[float], dict[str, Tensor]]:
    trainer = _trainer(kind, output, axes)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: tensor.detach().clone() for name, tensor in stream_weights(trainer.model)}


@pytest.mark.parametrize(("kind", "axes"), [("Trainer", {"dp_shard": 2}), ("SFTTrainer", {"dp_shard": 2, "tp": 2})])
def test_trainers_add_the_loss_of_heads_as_in_one_process(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, kind: str, axes: Mapping[str, int]
) -> None:
    losses, expected = _trained(kind, tmp_path, None)
    for found, weights in (four_ranks if len(axes) > 1 else two_ranks).run(_trained, kind, tmp_path, axes):
        assert found == pytest.approx(losses, rel=1e-5)
        assert not {name for name, value in expected.items() if largest(weights[name] - value) > 1e-5}
    assert any("eh_proj" in name for name in expected)


def _refusal(kind: str, output: Path, axes: Mapping[str, int], options: Mapping[str, Any]) -> str:
    with pytest.raises(OptionError) as error:
        _trainer(kind, output, axes, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "axes", "options", "reason"),
    [
        ("Trainer", {"dp_shard": 2}, {"label_smoothing_factor": 0.1}, "label_smoother"),
        ("SFTTrainer", {"cp": 2}, {}, "with cp gives"),
        ("GRPOTrainer", {"dp_shard": 2}, {"num_generations": 2}, "with a loss of log-probabilities gives"),
    ],
)
def test_trainers_refuse_heads_that_would_get_no_labels(
    two_ranks: RankPool, tmp_path: Path, kind: str, axes: Mapping[str, int], options: Mapping[str, Any], reason: str
) -> None:
    for message in two_ranks.run(_refusal, kind, tmp_path, axes, options):
        assert reason in message
