"""What a trainer makes of a path, a plain model, a peft config and a reference; run by ``nox -s trainers``."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
import trl.experimental

from fsdp_runtime import ModelError, OptionError, stream_weights
from fsdp_runtime.trainers import on_mesh
from fsdp_runtime.trainers._trl_compat import replaced
from harness.parity import mesh_for
from harness.ranks import RankPool
from harness.trainers import (
    COMMON,
    Outcome,
    adapted_as_on_a_mesh,
    differences,
    dp_size,
    forget_accelerate,
    model_on,
    token_rows,
    write_checkpoint,
)
from harness.trl_trainers import build, trainers

AXES = {"dp_shard": 2, "tp": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def _plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _adapted(folder: Path) -> Any:
    """A model in an adapter that has been trained, so that it is not the identity."""
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(_plain(folder), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def _run(kind: str, name: str, folder: Path, output: Path, axes: dict[str, int] | None, **options: Any) -> Outcome:
    """Train with a model of a kind that is not sharded yet."""
    forget_accelerate()
    mesh = None if axes is None else mesh_for(axes)
    model = {"path": lambda: str(folder), "plain": lambda: _plain(folder), "adapted": lambda: _adapted(folder)}[kind]()
    drawn = {"get_peft_model": adapted_as_on_a_mesh} if kind == "path" and mesh is None else {}
    with replaced(trainers()[name][0], drawn):
        trainer = build(model, mesh, dp_size(axes), name=name, output=str(output), **options)
    trainer.train()
    own = trainer.model
    if isinstance(own, peft.PeftModel):
        trainer.save_model(str(output / "saved"))
        return Outcome(trainer.state.log_history, {}, "")
    return Outcome(trainer.state.log_history, {n: t.detach().clone() for n, t in stream_weights(own)}, "")


def _lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a path": ("path", "SFT", {}),
    "a path, and a reference": ("path", "DPO", {}),
    "a path, and peft_config": ("path", "SFT", {"peft_config": _lora()}),
    "a path to a policy, and peft_config": ("path", "GRPO", {"peft_config": _lora(), "beta": 0.1}),
    "a path to a policy": ("path", "GRPO", {}),
    "a plain model": ("plain", "KTO", {}),
    "peft_config": ("plain", "SFT", {"peft_config": _lora()}),
    "peft_config, and the base as reference": ("plain", "DPO", {"peft_config": _lora()}),
    "a PeftModel, and a copy as reference": ("adapted", "DPO", {}),
    "a PeftModel, and a copy as reference of a policy": ("adapted", "GRPO", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_figures_are_those_of_one_process(four_ranks: RankPool, folder: Path, tmp_path: Path, case: str) -> None:
    kind, name, options = CASES[case]
    found = four_ranks.run(_run, kind, name, folder, tmp_path / "mesh", AXES, timeout=400, **options)[0]
    expected = _run(kind, name, folder, tmp_path / "alone", None, **options)
    assert differences(found, expected, ("loss", "grad_norm", *trainers()[name][-1])) == {}
    if kind == "adapted" or options:
        loaded = [
            peft.PeftModel.from_pretrained(_plain(folder), tmp_path / run / "saved").state_dict()
            for run in ("mesh", "alone")
        ]
        for key, weight in loaded[1].items():
            assert torch.allclose(loaded[0][key], weight, atol=2e-5), key


def _model_init(folder: Path, output: Path, axes: dict[str, int] | None, changes: dict[str, Any]) -> Outcome:
    forget_accelerate()
    options = {**COMMON, "max_steps": 4, "per_device_train_batch_size": 4 // dp_size(axes), **changes}
    options.setdefault("per_device_eval_batch_size", 4 // dp_size(axes))
    common = {
        "model_init": lambda: _plain(folder),
        "args": transformers.TrainingArguments(output_dir=str(output), **options),
        "train_dataset": token_rows(),
        "eval_dataset": token_rows(8, seed=1),
        "data_collator": transformers.default_data_collator,
    }
    trainer = (
        transformers.Trainer(**common) if axes is None else on_mesh(transformers.Trainer)(**common, mesh=mesh_for(axes))
    )
    trainer.train()
    weights = {n: t.detach().clone() for n, t in stream_weights(trainer.model)}
    return Outcome(trainer.state.log_history, weights, "", trainer.evaluate())


VARIANTS: dict[str, dict[str, Any]] = {
    "model_init": {},
    "use_liger_kernel": {"use_liger_kernel": True},
    "eval_on_start": {"eval_on_start": True},
    "the best model at the end": {
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 1,
        "eval_steps": 1,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the first checkpoint, which is not the last
    },
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_give_the_numbers_of_one_process(
    four_ranks: RankPool, folder: Path, tmp_path: Path, variant: str
) -> None:
    changes = VARIANTS[variant]
    found = four_ranks.run(_model_init, folder, tmp_path / "mesh", AXES, changes, timeout=400)[0]
    alone = {name: value for name, value in changes.items() if name not in ("use_liger_kernel", "torch_compile")}
    alone.pop("torch_compile_backend", None)
    expected = _model_init(folder, tmp_path / "alone", None, alone)
    assert differences(found, expected) == {}
    ours, theirs = ([e["eval_loss"] for e in outcome.history if "eval_loss" in e] for outcome in (found, expected))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert found.evaluation["eval_loss"] == pytest.approx(expected.evaluation["eval_loss"], rel=1e-5)


def _refused(folder: Path, output: Path) -> list[str]:
    forget_accelerate()
    sharded, mesh = model_on(folder, {"tp": 2})
    forget_accelerate()
    args = trl.DPOConfig(output_dir=str(output), **COMMON)
    recomputing = trl.DPOConfig(output_dir=str(output), **COMMON, gradient_checkpointing=True)
    data = trainers()["DPO"][2]()
    said = []
    for given in (
        {"model": sharded, "peft_config": _lora()},
        {"model": sharded, "parallelize_kwargs": {"logits": "full"}},
        {"model": 3},
        {"model": sharded, "args": recomputing},
        {"model": _plain(folder), "args": recomputing, "parallelize_kwargs": {"activation_checkpointing": "block"}},
    ):
        try:
            on_mesh(trl.DPOTrainer)(**{"mesh": mesh, "args": args, "train_dataset": data, **given})
        except (OptionError, ModelError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("accepted")
    return said


def test_what_comes_too_late_is_refused_with_the_fix(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for adapter, options, number, once, twice in two_ranks.run(_refused, folder, tmp_path):
        assert all(said.startswith("OptionError") for said in (adapter, options))
        assert all("before parallelize" in said for said in (adapter, options))
        assert "pass a model or its path" in number
        assert once == "accepted"
        assert "set their gradient_checkpointing=False" in twice


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(OptionError, match="does not derive from"):
        on_mesh(dict)


#: Of the experimental trainers, those that are taken; and those with a loss or batches of their own, with the nearest.
TAKEN = {"AsyncGRPOTrainer", "GKDTrainer", "GMPOTrainer", "DPOTrainer", "DistillationTrainer", "KTOTrainer"}
REFUSED = {
    "A2POTrainer": "RLOOTrainer",
    "AsyncDistillationTrainer": "DistillationTrainer",
    "CPOTrainer": "DPOTrainer",
    "GOLDTrainer": "DistillationTrainer",
    "IWOPDTrainer": "DistillationTrainer",
    "OnlineDPOTrainer": "DPOTrainer",
    "ORPOTrainer": "DPOTrainer",
    "SDFTTrainer": "DistillationTrainer",
    "SDPOTrainer": "DistillationTrainer",
    "ServerDistillationTrainer": "DistillationTrainer",
    "TPOTrainer": "DPOTrainer",
}


def _experimental() -> dict[str, type]:
    found: dict[str, type] = {}
    for each in pkgutil.iter_modules(trl.experimental.__path__):
        if each.name in ("harbor", "openreward"):  # environments, which want packages of their own
            continue
        module = importlib.import_module(f"trl.experimental.{each.name}")
        values = (getattr(module, name) for name in dir(module) if not name.startswith("_"))
        found |= {v.__name__: v for v in values if isinstance(v, type) and issubclass(v, transformers.Trainer)}
    return found


def test_every_experimental_trainer_is_taken_or_refused_with_the_nearest() -> None:
    experimental = _experimental()
    assert experimental.keys() == TAKEN | REFUSED.keys()
    for name, trainer in experimental.items():
        if name in TAKEN:
            assert issubclass(on_mesh(trainer), trainer)
            continue
        for refused in (trainer, type("Derived", (trainer,), {})):
            with pytest.raises(
                OptionError, match=rf"{name}\.\w+.* use a trainer of trl itself, such as trl.{REFUSED[name]},"
            ):
                on_mesh(refused)
