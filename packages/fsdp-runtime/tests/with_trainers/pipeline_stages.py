"""``transformers.Trainer`` and TRL's ``SFTTrainer`` in pipeline stages against the trainers of one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainingArguments

from fsdp_runtime import FsdpRuntimeError, parallelize
from fsdp_runtime.steps import Pipeline
from fsdp_runtime.trainers import MeshAccelerator, SFTTrainer, Trainer, on_mesh
from harness.models import VOCAB
from harness.parity import mesh_for
from harness.ranks import RankPool
from harness.trainers import (
    BATCH,
    COMMON,
    Outcome,
    compare,
    differences,
    dp_size,
    forget_accelerate,
    token_rows,
    tokenizer,
    train,
    with_low_rank_adapters,
    write_checkpoint,
)

STEPS = 5
FIGURES = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
PP, PP_TP, PP_FSDP = {"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def token_accuracy(prediction: Any) -> dict[str, float]:
    scored = prediction.label_ids[:, 1:] != -100
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right[scored].mean())}


def sentences(count: int = 20) -> Dataset:
    generator = torch.Generator().manual_seed(0)

    def words(number: int) -> str:
        return " ".join(f"t{index}" for index in torch.randint(4, VOCAB, (number,), generator=generator).tolist())

    return Dataset.from_list([{"prompt": words(2 + i % 3), "completion": " " + words(4 + i % 5)} for i in range(count)])


def _arguments(dp: int, output: str, options: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {**COMMON, "output_dir": output, "max_steps": STEPS, "gradient_accumulation_steps": 2}
    given |= {"per_device_train_batch_size": BATCH // dp // 2, "per_device_eval_batch_size": BATCH // dp}
    return {**given, **options}


def build(model: Any, mesh: Any, dp: int, *, output: str, metrics: bool = False, **options: Any) -> Any:
    common = {
        "model": model,
        "args": TrainingArguments(**_arguments(dp, output, options)),
        "train_dataset": token_rows(20),
        "eval_dataset": token_rows(8, seed=1),
        "processing_class": tokenizer(),
        "data_collator": transformers.default_data_collator,
        "compute_metrics": token_accuracy if metrics else None,
    }
    return transformers.Trainer(**common) if mesh is None else Trainer(**common, mesh=mesh)


def build_sft(model: Any, mesh: Any, dp: int, *, output: str, **options: Any) -> Any:
    common = {
        "model": model,
        "args": trl.SFTConfig(**_arguments(dp, output, {"gradient_checkpointing": False, **options})),
        "train_dataset": sentences(),
        "eval_dataset": sentences(8),
        "processing_class": tokenizer(),
    }
    return trl.SFTTrainer(**common) if mesh is None else SFTTrainer(**common, mesh=mesh)


def _stages(step: Pipeline | None = None, **parallel: Any) -> dict[str, Any]:
    return {"steps": (step or Pipeline(microbatches=2),), **parallel}


TRAINERS: dict[str, tuple[Any, Mapping[str, int], dict[str, Any], dict[str, Any]]] = {
    "Trainer": (build, PP, _stages(), {"metrics": True}),
    "Trainer, FSDP2": (build, PP_FSDP, _stages(), {}),
    "Trainer, SP": (build, PP_TP, _stages(sequence_parallel=True), {}),
    "Trainer, cp": (build, {"pp": 2, "cp": 2}, _stages(), {}),
    "Trainer, label smoothing": (build, PP, _stages(), {"label_smoothing_factor": 0.1}),
    "Trainer, ZBV": (build, PP, _stages(Pipeline("ZBVZeroBubble", 2, (1, 1, 1, 1))), {}),
    "Trainer, no clipping": (build, PP, _stages(), {"max_grad_norm": 0.0}),
    "Trainer, recomputation": (build, PP, _stages(), {"gradient_checkpointing": True}),
    "Trainer, a last step with one micro-batch": (
        partial(build, max_steps=-1, num_train_epochs=1),
        PP,
        _stages(Pipeline(microbatches=4)),
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
    ),
    "SFT": (build_sft, PP, _stages(), {}),
    "SFT, FSDP2": (build_sft, PP_FSDP, _stages(), {}),
    "SFT, TP": (build_sft, PP_TP, _stages(), {}),
    "SFT, packed": (build_sft, PP, _stages(packed_sequences=True), {"packing": True, "max_length": 24}),
    "SFT, DFT": (build_sft, PP, _stages(), {"loss_type": "dft"}),
    "SFT, interleaved": (build_sft, PP, _stages(Pipeline("Interleaved1F1B", 2)), {}),
}


@pytest.mark.parametrize("case", TRAINERS)
def test_trainers_in_stages_give_figures_and_weights_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, folder: Path, case: str
) -> None:
    setup, axes, parallel, options = TRAINERS[case]
    if "ZBV" in case or "interleaved" in case:
        folder = write_checkpoint(tmp_path / "deep", num_hidden_layers=4)
    pool = four_ranks if len(axes) > 1 else two_ranks
    key = f"stages {case.partition(',')[0]} {options} {folder if 'deep' in str(folder) else ''}"
    found, expected = compare(
        pool, partial(setup, output=str(tmp_path), **options), folder, axes, parallel=parallel, evaluate=True, key=key
    )
    assert differences(found, expected, FIGURES if case.startswith("SFT") else ("loss", "grad_norm")) == {}
    assert len(found.logged("loss")) >= 3
    assert found.evaluation.keys() >= {name for name in expected.evaluation if "per_second" not in name}
    for name in ("eval_loss", "eval_accuracy", "eval_mean_token_accuracy", "eval_entropy"):
        if name in expected.evaluation:
            assert found.evaluation[name] == pytest.approx(expected.evaluation[name], rel=1e-5), name


def _adapted(folder: Path, output: Path, axes: dict[str, int] | None) -> Outcome:
    forget_accelerate()
    wrapped = with_low_rank_adapters(folder)
    mesh = None if axes is None else mesh_for(axes)
    if mesh is not None:
        parallelize(wrapped, mesh, **_stages())
    trainer = build_sft(wrapped, mesh, dp_size(axes), output=str(output))
    trainer.train()
    trainer.save_model(str(output / "adapter"))
    return Outcome(trainer.state.log_history, {}, type(trainer.model_wrapped).__name__)


@pytest.mark.parametrize("axes", [PP, PP_FSDP], ids=str)
def test_adapters_in_stages_train_as_in_one_process_and_are_saved(
    two_ranks: RankPool, four_ranks: RankPool, folder: Path, tmp_path: Path, axes: dict[str, int]
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    found = pool.run(_adapted, folder, tmp_path / "mesh", axes, timeout=400)[0]
    expected = _adapted(folder, tmp_path / "alone", None)
    assert differences(found, expected, FIGURES) == {}
    loaded = []
    for run in ("mesh", "alone"):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        loaded.append(peft.PeftModel.from_pretrained(base, tmp_path / run / "adapter").state_dict())
    for name, weight in loaded[1].items():
        assert torch.allclose(loaded[0][name], weight, atol=2e-5), name


def _stopped(model: Any, mesh: Any, dp: int, **options: Any) -> Any:
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= 2

    trainer = build(model, mesh, dp, **options)
    trainer.add_callback(Stop())
    return trainer


def _resumed(folder: Path, output: Path, then: Mapping[str, int]) -> Outcome:
    """A run that stops after the second of five steps on ``pp`` with ``tp``, and goes on, perhaps on another mesh."""
    saving = {"save_strategy": "steps", "save_steps": 2, "output": str(output)}
    train(partial(_stopped, **saving), folder, PP_TP, **_stages())
    return train(partial(build, **saving), folder, then, resume=True, **(_stages() if "pp" in then else {}))


@pytest.mark.parametrize("then", [PP_TP, {"dp_shard": 2, "tp": 2}], ids=str)
def test_a_run_in_stages_resumes_as_the_uninterrupted_one(
    four_ranks: RankPool, folder: Path, tmp_path: Path, then: dict[str, int]
) -> None:
    resumed = four_ranks.run(_resumed, folder, tmp_path / "parts", then, timeout=400)[0]
    whole = train(partial(build, output=str(tmp_path / "whole")), folder, None)
    assert differences(resumed, whole) == {}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "checkpoint-4") is not None


def _by_path(folder: Path, output: Path, axes: dict[str, int] | None) -> Outcome:
    """A run of a model that the trainer loads; a mesh with stages needs no step."""
    forget_accelerate()
    mesh = None if axes is None else mesh_for(axes)
    trainer = build_sft(str(folder), mesh, dp_size(axes), output=str(output))
    trainer.train()
    return Outcome(trainer.state.log_history, {}, "")


def test_a_path_is_loaded_in_stages_of_the_accumulated_batches(
    two_ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    found = two_ranks.run(_by_path, folder, tmp_path / "mesh", PP, timeout=400)[0]
    assert differences(found, _by_path(folder, tmp_path / "alone", None), FIGURES) == {}


def _refusal(folder: Path, output: str, case: str) -> str:
    forget_accelerate()
    mesh, model = mesh_for(PP), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        if case == "DPO":
            on_mesh(trl.DPOTrainer)(model=model, mesh=mesh, args=trl.DPOConfig(output_dir=output, use_cpu=True))
        elif case == "GRPO":
            on_mesh(trl.GRPOTrainer)(model=model, mesh=mesh, args=trl.GRPOConfig(output_dir=output, use_cpu=True))
        elif case == "accelerate":
            MeshAccelerator(mesh)
        elif case == "microbatches":
            build(parallelize(model, mesh, **_stages(Pipeline(microbatches=4))), mesh, 1, output=output)
        elif case == "plain":
            build(parallelize(model, mesh, **_stages()), mesh_for({"tp": 2}), 1, output=output)
        elif case == "offloading":
            build_sft(model, mesh, 1, output=output, activation_offloading=True)
        elif case == "mixture":
            build_sft(model, mesh, 1, output=output)
    except FsdpRuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


REFUSED = {
    "DPO": "MeshError: the mesh has pp=2",
    "GRPO": "MeshError: the mesh has pp=2",
    "accelerate": "MeshError: the mesh has pp=2",
    "microbatches": "OptionError: gradient_accumulation_steps=2 and Pipeline(microbatches=4)",
    "plain": "ModelError: the model is in stages over pp=2, and the trainer's mesh has pp=1",
    "offloading": "OptionError: activation_offloading",
    "mixture": "OptionError: the auxiliary loss of the routers",
}


@pytest.mark.parametrize("case", REFUSED)
def test_trainers_refuse_stages_that_would_be_wrong(
    two_ranks: RankPool, folder: Path, tmp_path: Path, case: str
) -> None:
    if case == "mixture":
        folder = write_checkpoint(tmp_path / "mixture", architecture="Qwen3MoeForCausalLM")
    for said in two_ranks.run(_refusal, folder, str(tmp_path / "out"), case):
        assert said.startswith(REFUSED[case]), said
