"""Losses of a model's or a user's own code, and evaluations of any set, on a mesh; run by ``nox -s trainers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fsdp_runtime import OptionError, parallelize
from fsdp_runtime.trainers import on_mesh, training_arguments
from harness.models import VOCAB, jitter, tiny_config
from harness.parity import mesh_for
from harness.ranks import RankPool
from harness.trainers import BATCH, COMMON, Outcome, differences, dp_size, forget_accelerate, token_rows

LABELS = 5
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
_BERT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
#: Classes whose loss is a mean over the labels that they are given, whatever ``num_items_in_batch`` says.
MODELS: dict[str, Any] = {
    "T5ForConditionalGeneration": transformers.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **_T5),
    "BertForTokenClassification": transformers.BertConfig(
        vocab_size=VOCAB, num_labels=LABELS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_BERT
    ),
    "BertForSequenceClassification": transformers.BertConfig(
        vocab_size=VOCAB, num_labels=LABELS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_BERT
    ),
    "Qwen3ForSequenceClassification": tiny_config("Qwen3ForSequenceClassification", num_labels=LABELS),
}


def trainer_of(name: str, output: Path, axes: dict[str, int] | None, **given: Any) -> Any:
    forget_accelerate()
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(MODELS.get(name) or tiny_config(name)).float()
    jitter(model)
    samples = token_rows()
    if name in MODELS and "T5" not in name:
        for row in samples:
            few = [label if label == -100 else label % LABELS for label in row["labels"]]
            row["labels"] = row["input_ids"][0] % LABELS if "Sequence" in name else few
    ranks, steps, recipe = dp_size(axes), given.pop("steps", 1), given.pop("recipe", transformers.Trainer)
    settings = {"per_device_train_batch_size": BATCH // ranks // steps, "per_device_eval_batch_size": BATCH // ranks}
    args = transformers.TrainingArguments(
        **{**COMMON, "output_dir": str(output), "max_steps": 2, "gradient_accumulation_steps": steps, **settings}
    )
    common = {
        "args": args,
        "train_dataset": samples,
        "eval_dataset": samples[:8],
        "data_collator": transformers.default_data_collator,
        **given,
    }
    if axes is None:
        return recipe(model, **common)
    mesh = mesh_for(axes)
    parallelize(model, mesh)
    return on_mesh(recipe)(model=model, mesh=mesh, **common)


def _trained(name: str, output: Path, axes: dict[str, int] | None, steps: int) -> Outcome:
    trainer = trainer_of(name, output, axes, steps=steps)
    trainer.train()
    return Outcome([*trainer.state.log_history, trainer.evaluate()], {}, "")


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_means_over_labels_are_those_of_one_process(two_ranks: RankPool, tmp_path: Path, name: str, steps: int) -> None:
    found = two_ranks.run(_trained, name, tmp_path / "mesh", {"dp_shard": 2}, steps, timeout=200)[0]
    expected = _trained(name, tmp_path / "alone", None, steps)
    assert differences(found, expected, ("loss", "grad_norm", "eval_loss")) == {}


def of_torch(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def of_logits(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss that torch computes of sharded logits, as partial sums."""
    return outputs.logits.float().pow(2).sum() / num_items_in_batch / 100


def _refused(output: Path) -> str:
    trainer = trainer_of("Qwen3ForCausalLM", output, {"tp": 2}, compute_loss_func=of_torch)
    with pytest.raises(OptionError) as error:
        trainer.train()
    return str(error.value)


def test_a_loss_that_cannot_take_sharded_logits_is_named_with_the_fix(two_ranks: RankPool, tmp_path: Path) -> None:
    for said in two_ranks.run(_refused, tmp_path, timeout=100):
        assert "outputs.logits is a DTensor" in said
        assert "rl_logprobs.token_statistics" in said


def _by(output: Path, axes: dict[str, int] | None, function: Any) -> Outcome:
    trainer = trainer_of("Qwen3ForCausalLM", output, axes, compute_loss_func=function)
    trainer.train()
    return Outcome(trainer.state.log_history, {}, "")


@pytest.mark.parametrize(("axes", "function"), [({"tp": 2}, of_logits), ({"dp_shard": 2}, of_torch)], ids=["tp", "dp"])
def test_a_loss_of_ones_own_is_that_of_one_process(
    two_ranks: RankPool, tmp_path: Path, axes: dict[str, int], function: Any
) -> None:
    found = two_ranks.run(_by, tmp_path / "mesh", axes, function, timeout=100)[0]
    assert differences(found, _by(tmp_path / "alone", None, function)) == {}


WEIGHTS = torch.linspace(0.5, 3.0, LABELS)


class _Weighted(transformers.Trainer):
    """The recipe for class weights: the sum of a rank, divided by the weights of all."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        labels = inputs["labels"]
        total = self.accelerator.gather(WEIGHTS[labels].sum()).sum()
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=WEIGHTS, reduction="sum") / total
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class _OfRank(transformers.Trainer):
    """The usual recipe: a weighted mean of the batch of a rank."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, inputs["labels"], weight=WEIGHTS)
        return (loss, outputs) if return_outputs else loss


def _subclassed(output: Path, axes: dict[str, int] | None, recipe: Any, model: str, steps: int = 1) -> Outcome:
    trainer = trainer_of(model, output, axes, recipe=recipe, steps=steps)
    trainer.train()
    return Outcome([*trainer.state.log_history, trainer.evaluate()], {}, "")


@pytest.mark.parametrize("model", ["Qwen3ForSequenceClassification", "BertForSequenceClassification"])
def test_class_weights_are_those_of_one_process(two_ranks: RankPool, tmp_path: Path, model: str) -> None:
    found = two_ranks.run(_subclassed, tmp_path / "mesh", {"dp_shard": 2}, _Weighted, model, timeout=100)[0]
    expected = _subclassed(tmp_path / "alone", None, _Weighted, model)
    assert differences(found, expected, ("loss", "grad_norm", "eval_loss")) == {}


def test_a_mean_of_a_rank_is_that_of_a_micro_batch_as_under_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    model = "BertForSequenceClassification"
    found = two_ranks.run(_subclassed, tmp_path / "mesh", {"dp_shard": 2}, _OfRank, model, timeout=100)[0]
    expected = _subclassed(tmp_path / "alone", None, _OfRank, model, steps=2)
    assert differences(found, expected) == {}


def _warned(output: Path) -> list[str]:
    trainer = trainer_of("Qwen3ForCausalLM", output, {"dp_shard": 2})
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_arguments.logger, "warning", lambda text, *values: said.append(text % values))
        trainer.evaluate(token_rows(5))
        trainer.predict(token_rows(5))
        trainer.predict(token_rows(6))
        trainer.predict(token_rows(8))
    return said


def test_other_sets_that_do_not_fill_the_last_batch_are_warned_of_once(two_ranks: RankPool, tmp_path: Path) -> None:
    for five, six in two_ranks.run(_warned, tmp_path, timeout=100):
        assert "evaluation set's 5 samples are no multiple of 4" in five
        assert "evaluation set's 6 samples are no multiple of 4" in six
