"""``trl.SFTTrainer`` on a mesh against the trainer of one process; run by ``nox -s trainers``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM

from fsdp_runtime import ModelError, OptionError, load_weights, parallelize
from fsdp_runtime.optim import Muon
from fsdp_runtime.trainers import SFTTrainer
from fsdp_runtime.trainers.logits import add_fused_lm_head
from harness.models import VOCAB, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool
from harness.trainers import (
    BATCH,
    COMMON,
    Outcome,
    compare,
    differences,
    forget_accelerate,
    model_on,
    tokenizer,
    train,
    with_low_rank_adapters,
    write_checkpoint,
)

MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2})
FIGURES = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def rows(count: int = 16) -> Dataset:
    """Prompts and completions of words, of several lengths."""
    generator = torch.Generator().manual_seed(0)

    def words(number: int) -> str:
        return " ".join(f"t{index}" for index in torch.randint(4, VOCAB, (number,), generator=generator).tolist())

    return Dataset.from_list([{"prompt": words(2 + i % 3), "completion": " " + words(4 + i % 5)} for i in range(count)])


def build(model: Any, mesh: Any, dp: int, *, output: str, optimizer: Any = None, **options: Any) -> Any:
    """A trainer of three steps, on a mesh or, for ``mesh=None``, TRL's own."""
    accumulation = options.get("gradient_accumulation_steps", 1)
    given = {
        **COMMON,
        "output_dir": output,
        "per_device_train_batch_size": BATCH // dp // accumulation,
        "per_device_eval_batch_size": BATCH // dp,
        "max_steps": 3,
        "gradient_checkpointing": False,
    }
    common = {
        "model": model,
        "args": trl.SFTConfig(**{**given, **options}),
        "train_dataset": rows(),
        "eval_dataset": rows(8),
        "processing_class": tokenizer(),
        "optimizers": (None if optimizer is None else optimizer(model), None),
    }
    return trl.SFTTrainer(**common) if mesh is None else SFTTrainer(**common, mesh=mesh)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_figures_and_weights_are_those_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, folder: Path, tmp_path: Path, axes: dict[str, int]
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    found, expected = compare(pool, partial(build, output=str(tmp_path)), folder, axes, evaluate=True, key="sft")
    assert differences(found, expected, FIGURES) == {}
    assert found.wrapper.endswith("Qwen3ForCausalLM")
    for name in ("eval_loss", "eval_mean_token_accuracy", "eval_entropy"):
        assert found.logged(name) == pytest.approx(expected.logged(name), rel=1e-5), name


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence parallelism": ({"sequence_parallel": True}, {}),
    "TRL's default activation checkpointing": ({}, {"gradient_checkpointing": True}),
    "accumulated gradients": ({}, {"gradient_accumulation_steps": 2}),
    "packing": ({}, {"packing": True, "packing_strategy": "wrapped", "max_length": 12}),
    "rows that are packed by best fit": ({}, {"packing": True, "max_length": 24}),
    "the DFT loss": ({}, {"loss_type": "dft"}),
    "the loss of the whole text": ({}, {"completion_only_loss": False}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_they_are_with_every_option(four_ranks: RankPool, folder: Path, tmp_path: Path, variant: str) -> None:
    parallel, options = VARIANTS[variant]
    axes = {"dp_shard": 2, "tp": 2}
    set_up = partial(build, output=str(tmp_path), **options)
    found, expected = compare(four_ranks, set_up, folder, axes, parallel=parallel, key=f"sft {options}")
    assert differences(found, expected, FIGURES) == {}


def test_muon_trains_as_in_one_process(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    set_up = partial(build, output=str(tmp_path), optimizer=partial(Muon, lr=1e-3, ns_dtype=torch.float32))
    found, expected = compare(four_ranks, set_up, folder, {"dp_shard": 2, "tp": 2}, key="sft muon")
    assert differences(found, expected, FIGURES) == {}


@pytest.mark.parametrize("parallel", [{}, {"packed_sequences": True}], ids=str)
def test_packed_rows_divided_over_ranks_give_the_figures_of_one_process(
    two_ranks: RankPool, folder: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    options = VARIANTS["rows that are packed by best fit"][1]
    set_up = partial(build, output=str(tmp_path), **options)
    found, expected = compare(two_ranks, set_up, folder, {"cp": 2}, parallel=parallel, key=f"sft {options}")
    assert differences(found, expected, FIGURES) == {}


def _adapted(folder: Path, output: Path, axes: dict[str, int] | None) -> Outcome:
    """A run with low-rank adapters; what is left of them is merged in the outcome's weights."""
    forget_accelerate()
    wrapped = with_low_rank_adapters(folder)
    mesh = None if axes is None else mesh_for(axes)
    if mesh is not None:
        parallelize(wrapped, mesh)
    trainer = build(wrapped, mesh, 1 if axes is None else axes.get("dp_shard", 1), output=str(output))
    trainer.train()
    trainer.save_model(str(output / "adapter"))
    return Outcome(trainer.state.log_history, {}, type(trainer.model_wrapped).__name__)


def test_adapters_train_as_in_one_process_and_are_saved_as_peft_reads_them(
    four_ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    found = four_ranks.run(_adapted, folder, tmp_path / "mesh", {"dp_shard": 2, "tp": 2}, timeout=400)[0]
    expected = _adapted(folder, tmp_path / "alone", None)
    assert differences(found, expected, FIGURES) == {}
    loaded = []
    for run in ("mesh", "alone"):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        loaded.append(peft.PeftModel.from_pretrained(base, tmp_path / run / "adapter").state_dict())
    for name, weight in loaded[1].items():
        assert torch.allclose(loaded[0][name], weight, atol=2e-5), name


def _resumed(folder: Path, output: Path, axes: dict[str, int]) -> tuple[Outcome, Outcome]:
    saving = {"save_strategy": "steps", "save_steps": 1, "output": str(output)}
    whole = train(partial(build, **saving), folder, axes)
    resumed = train(partial(build, **saving), folder, axes, resume=str(output / "checkpoint-2"))
    return whole, resumed


def test_a_resumed_run_is_the_uninterrupted_one(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    whole, resumed = two_ranks.run(_resumed, folder, tmp_path, {"tp": 2}, timeout=400)[0]
    assert differences(resumed, whole) == {}


def _template(folder: Path, template: Path, output: Path) -> str:
    forget_accelerate()
    arguments = trl.SFTConfig(
        output_dir=str(output), use_cpu=True, bf16=False, report_to=[], chat_template_path=str(template)
    )
    try:
        SFTTrainer(
            model=str(folder),
            mesh=mesh_for({"tp": 2}),
            args=arguments,
            train_dataset=rows(),
            processing_class=tokenizer(),
        )
    except ModelError as error:
        return str(error)
    return "accepted"


def test_a_chat_template_that_brings_tokens_is_refused(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    more = tokenizer()
    more.add_tokens(["new"], special_tokens=True)
    more.save_pretrained(tmp_path / "template")
    for said in two_ranks.run(_template, folder, tmp_path / "template", tmp_path):
        assert "resize_token_embeddings" in said
        assert "before parallelize" in said


def _refused(folder: Path, output: Path) -> str:
    forget_accelerate()
    model, mesh = model_on(folder, {"tp": 2})
    load_weights(model, folder)
    arguments = trl.SFTConfig(output_dir=str(output), use_cpu=True, bf16=False, report_to=[])
    try:
        SFTTrainer(model=model, mesh=mesh, args=arguments, train_dataset=rows(), peft_config=peft.LoraConfig())
    except OptionError as error:
        return str(error)
    return "accepted"


def test_wrapping_in_adapters_after_parallelize_is_refused(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    assert all("get_peft_model before parallelize" in said for said in two_ranks.run(_refused, folder, tmp_path))


def test_add_fused_lm_head_returns_no_views() -> None:
    model = tiny_model("Qwen3ForCausalLM")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    tokens = torch.arange(3, 15).reshape(2, 6)
    output = model(input_ids=tokens, labels=tokens, fused_lm_head=True)
    assert not output.log_probs._is_view()  # FSDP2 hooks an output, and operations in place drop the hook of a view
    assert not output.entropy._is_view()
