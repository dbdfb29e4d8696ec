"""``transformers.Trainer`` on a mesh against the trainer of one process; run by ``nox -s trainers``."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from fsdp_runtime import BackendError, MeshError, ModelError, OptionError, stream_weights
from fsdp_runtime.steps import Float8
from fsdp_runtime.trainers import Trainer, training_arguments
from harness.ranks import RankPool
from harness.trainers import (
    BATCH,
    COMMON,
    Outcome,
    compare,
    differences,
    dp_size,
    forget_accelerate,
    model_on,
    token_rows,
    tokenizer,
    train,
    write_checkpoint,
)

MESHES: tuple[dict[str, int], ...] = (
    {"tp": 2},
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2},
)
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def token_accuracy(prediction: Any) -> dict[str, float]:
    """A metric that needs the full logits."""
    scored = prediction.label_ids[:, 1:] != -100
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right[scored].mean()), "scored": int(scored.sum())}


def build(model: Any, mesh: Any, dp: int, *, output: str, metrics: bool = False, **options: Any) -> Any:
    """A trainer of a few steps, on a mesh or, for ``mesh=None``, transformers' own."""
    accumulation = options.get("gradient_accumulation_steps", 1)
    given = {
        **COMMON,
        "output_dir": output,
        "per_device_train_batch_size": BATCH // dp // accumulation,
        "per_device_eval_batch_size": BATCH // dp,
        "max_steps": STEPS,
    }
    common = {
        "model": model,
        "args": TrainingArguments(**{**given, **options}),
        "train_dataset": token_rows(),
        "eval_dataset": token_rows(8, seed=1),
        "processing_class": tokenizer(),
        "data_collator": transformers.default_data_collator,
        "compute_metrics": token_accuracy if metrics else None,
    }
    return transformers.Trainer(**common) if mesh is None else Trainer(**common, mesh=mesh)


def pool_of(axes: Mapping[str, int], two_ranks: RankPool, four_ranks: RankPool) -> RankPool:
    return four_ranks if len(axes) > 1 else two_ranks


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_losses_norms_and_weights_are_those_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, folder: Path, tmp_path: Path, axes: dict[str, int]
) -> None:
    pool = pool_of(axes, two_ranks, four_ranks)
    found, expected = compare(pool, partial(build, output=str(tmp_path)), folder, axes, key="plain")
    assert len(found.logged("loss")) == STEPS
    assert differences(found, expected) == {}
    assert found.wrapper.endswith("Qwen3ForCausalLM")


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "label smoothing": ({}, {"label_smoothing_factor": 0.1}),
    "sequence parallelism": ({"sequence_parallel": True}, {}),
    "full logits": ({"logits": "full"}, {}),
    "accumulated gradients": ({}, {"gradient_accumulation_steps": 2}),
    "activation checkpointing by transformers": ({}, {"activation_checkpointing": True}),
    "activation checkpointing by parallelize": ({"activation_checkpointing": "block"}, {}),
    "no clipping": ({}, {"max_grad_norm": 0.0}),
    "each rank's own mean": ({}, {"average_tokens_across_devices": False}),
    "sgd": ({}, {"optim": "sgd"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_they_are_with_every_option(four_ranks: RankPool, folder: Path, tmp_path: Path, variant: str) -> None:
    parallel, options = VARIANTS[variant]
    axes = {"tp": 2, "dp_replicate": 2} if variant == "accumulated gradients" else {"dp_shard": 2, "tp": 2}
    if variant == "each rank's own mean":
        axes = {"dp_shard": 1, "tp": 4}  # over dp, means of unequal parts are not the mean of one process
    set_up = partial(build, output=str(tmp_path), **options)
    found, expected = compare(four_ranks, set_up, folder, axes, parallel=parallel, key=repr(options))
    assert differences(found, expected) == {}


def test_float8_by_parallelize_takes_the_steps_of_one_process(
    two_ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    float8 = {"steps": (Float8("rowwise", emulate=True),)}
    set_up, runs = partial(build, output=str(tmp_path)), []
    for axes in ({"dp_shard": 1, "tp": 2}, {"dp_shard": 2}):
        runs.append(compare(two_ranks, set_up, folder, axes, parallel=float8, key="plain"))
    (sharded, plain), (alone, _) = runs
    assert sharded.logged("loss") == pytest.approx(alone.logged("loss"), rel=1e-3)
    assert sharded.logged("loss") == pytest.approx(plain.logged("loss"), rel=2e-2)
    assert differences(sharded, plain) != {}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_they_are_for_untied_and_tied_heads(four_ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    write_checkpoint(tmp_path / "in", architecture=architecture)
    set_up = partial(build, output=str(tmp_path / "out"))
    found, expected = compare(four_ranks, set_up, tmp_path / "in", {"dp_shard": 2, "tp": 2}, key=architecture)
    assert differences(found, expected) == {}


@pytest.mark.parametrize("axes", MESHES[:1] + MESHES[3:4], ids=str)
def test_evaluation_gives_the_loss_and_the_metrics_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, folder: Path, tmp_path: Path, axes: dict[str, int]
) -> None:
    set_up = partial(build, output=str(tmp_path), metrics=True)
    pool = pool_of(axes, two_ranks, four_ranks)
    found, expected = compare(pool, set_up, folder, axes, evaluate=True, key="evaluation")
    for name in ("eval_loss", "eval_accuracy", "eval_scored"):
        assert found.evaluation[name] == pytest.approx(expected.evaluation[name], rel=1e-5), name


def test_a_saved_model_is_one_that_from_pretrained_reads(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(folder, tmp_path / "in")
    for name in ("chat_template.jinja", "special_tokens_map.json", "processor_config.json"):
        (source / name).write_text("{}")
    set_up = partial(build, output=str(tmp_path / "out"))
    axes = {"dp_shard": 2, "tp": 2}
    outcome = four_ranks.run(train, set_up, source, axes, save_to=tmp_path / "saved", timeout=400)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, weight in model.state_dict().items():
        if name in outcome.weights:
            assert torch.equal(weight, outcome.weights[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("t5 t6")["input_ids"] == [5, 6]
    assert (tmp_path / "saved" / "training_args.bin").exists()
    assert (tmp_path / "saved" / "processor_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == tokenizer().chat_template
    assert not (tmp_path / "saved" / "special_tokens_map.json").exists()  # of the checkpoint's tokenizer


def _resumed(folder: Path, output: Path, first: Mapping[str, int], then: Mapping[str, int]) -> Any:
    """An uninterrupted run, and one that stops after the second of four steps and goes on, on another mesh perhaps."""
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(partial(build, output=str(output / "whole"), **saving), folder, first)
    train(partial(stopped_after_two, output=str(output / "parts"), **saving), folder, first)
    resumed = train(partial(build, output=str(output / "parts"), **saving), folder, then, resume=True)
    return whole, resumed


def stopped_after_two(model: Any, mesh: Any, dp: int, **options: Any) -> Any:
    """The trainer of four steps, interrupted after the second."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= 2

    trainer = build(model, mesh, dp, **options)
    trainer.add_callback(Stop())
    return trainer


@pytest.mark.parametrize("then", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4}], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(
    four_ranks: RankPool, folder: Path, tmp_path: Path, then: dict[str, int]
) -> None:
    whole, resumed = four_ranks.run(_resumed, folder, tmp_path, {"dp_shard": 2, "tp": 2}, then, timeout=400)[0]
    assert [entry["step"] for entry in resumed.history if "loss" in entry] == [1, 2, 3, 4]
    assert differences(resumed, whole) == {}
    saved = tmp_path / "parts" / "checkpoint-4"
    assert set(load_file(saved / "model.safetensors")) == set(whole.weights)
    assert AutoModelForCausalLM.from_pretrained(saved) is not None


def test_bf16_trains_close_to_the_autocast_of_one_process(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    set_up = partial(build, output=str(tmp_path), bf16=True)
    found, expected = compare(four_ranks, set_up, folder, {"dp_shard": 2, "tp": 2}, key="bf16")
    assert found.logged("loss") == pytest.approx(expected.logged("loss"), rel=5e-3)
    assert found.logged("grad_norm") == pytest.approx(expected.logged("grad_norm"), rel=5e-2)


REFUSED: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": True},
    "torch_compile": {"torch_compile": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "bf16_full_eval": {"bf16_full_eval": True},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "adafactor": {"optim": "adafactor"},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
}


def _refusals(folder: Path, output: Path) -> list[str]:
    """What does not raise the error that it should."""
    forget_accelerate()
    model, mesh = model_on(folder, {"tp": 2})
    failures = []

    def expect(kind: type[Exception], words: str, **changes: Any) -> None:
        given = {"model": model, "mesh": mesh, "train_dataset": token_rows(), **changes}
        given.setdefault("args", TrainingArguments(output_dir=str(output), use_cpu=True, report_to=[]))
        try:
            Trainer(**given)
        except kind as error:
            if words not in str(error):
                failures.append(f"{words}: {error}")
        else:
            failures.append(f"{words}: accepted")

    for words, options in REFUSED.items():
        arguments = TrainingArguments(output_dir=str(output), use_cpu=True, report_to=[])
        for name, value in options.items():
            if name == "accelerator_config":
                arguments.accelerator_config.dispatch_batches = True
            else:
                setattr(arguments, name, value)
        expect(OptionError, words, args=arguments)
    expect(OptionError, "before parallelize", parallelize_kwargs={"logits": "full"})
    expect(ModelError, "load it by name", model="Qwen/Qwen3-0.6B")
    expect(MeshError, "rows", mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("rows",)))
    recomputing, _ = model_on(folder, {"tp": 2}, activation_checkpointing="block")
    again = TrainingArguments(output_dir=str(output), use_cpu=True, report_to=[], activation_checkpointing=True)
    expect(OptionError, "gradient_checkpointing=False", model=recomputing, args=again)
    more = tokenizer()
    more.add_tokens(["new"])
    for given in (more, SimpleNamespace(tokenizer=more)):  # a processor
        expect(ModelError, "resize_token_embeddings(len(tokenizer)) before parallelize", processing_class=given)
    return failures


def test_what_cannot_be_right_is_refused_with_the_fix(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    assert two_ranks.run(_refusals, folder, tmp_path) == [[], []]


def _short(folder: Path, output: Path) -> list[str]:
    """What is said of one sample, of six in batches of two, and of five for evaluation."""
    forget_accelerate()
    model, mesh = model_on(folder, {"dp_shard": 2})
    args = TrainingArguments(
        **{**COMMON, "output_dir": str(output), "per_device_train_batch_size": 2}, per_device_eval_batch_size=2
    )
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_arguments.logger, "warning", lambda text, *values: said.append(text % values))
        for number in (1, 6, 8):
            try:
                Trainer(model=model, mesh=mesh, args=args, train_dataset=token_rows(number))
            except OptionError as error:
                said.append(str(error))
        Trainer(model=model, mesh=mesh, args=args, train_dataset=token_rows(8), eval_dataset=token_rows(5))
    return said


def test_a_training_set_shorter_than_the_ranks_is_refused(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for refused, warned, evaluation in two_ranks.run(_short, folder, tmp_path):
        assert "1 samples for dp=2" in refused
        assert "training set's 6 samples are no multiple of 4" in warned
        assert "evaluation set's 5 samples are no multiple of 4" in evaluation


def _warnings(folder: Path, output: Path) -> list[str]:
    """The warnings of a trainer with an option that it drops, and 8 samples for batches of 3 on two ranks."""
    forget_accelerate()
    model, mesh = model_on(folder, {"dp_shard": 2})
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_runtime").addHandler(handler)
    try:
        build(model, mesh, 2, output=str(output), per_device_eval_batch_size=3, use_liger_kernel=True)
    finally:
        logging.getLogger("fsdp_runtime").removeHandler(handler)
    return [message.partition(" ")[0] for message in heard]


def test_warnings_of_a_trainer_come_from_one_rank(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    assert two_ranks.run(_warnings, folder, tmp_path) == [["use_liger_kernel=True:", "the"], []]


def _undivided(folder: Path, output: Path) -> str:
    """What is said of a batch of all ranks that they cannot divide."""
    forget_accelerate()
    model, mesh = model_on(folder, {"dp_shard": 2})
    options = {"per_device_train_batch_size": 3, "accelerator_config": {"split_batches": True}, "max_steps": 1}
    args = TrainingArguments(**{**COMMON, "output_dir": str(output), **options})
    try:
        Trainer(model=model, mesh=mesh, args=args, train_dataset=token_rows()).train()
    except (OptionError, ValueError) as error:
        return str(error)
    return "accepted"


def test_a_batch_that_the_ranks_do_not_divide_is_refused(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for said in two_ranks.run(_undivided, folder, tmp_path):
        assert "multiple" in said


def _evaluated_on(folder: Path, output: Path, axes: dict[str, int] | None, count: int) -> dict[str, float]:
    forget_accelerate()
    model, mesh = model_on(folder, axes)
    trainer = build(model, mesh, dp_size(axes), output=str(output), metrics=True)
    found: dict[str, float] = trainer.evaluate(token_rows(count, seed=1))
    return found


def test_an_evaluation_set_shorter_than_the_ranks_counts_once(
    two_ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    found = two_ranks.run(_evaluated_on, folder, tmp_path / "mesh", {"dp_shard": 2}, 1)[0]
    expected = _evaluated_on(folder, tmp_path / "alone", None, 1)
    for key in ("eval_loss", "eval_accuracy", "eval_scored"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5)


def _added_later(folder: Path, output: Path, axes: dict[str, int] | None) -> str:
    """What is raised for a token that was added when the trainer was there."""
    forget_accelerate()
    model, mesh = model_on(folder, axes)
    trainer = build(model, mesh, dp_size(axes), output=str(output))
    trainer.processing_class.add_tokens(["new"])
    row = token_rows(1)[0]
    row["input_ids"][1] = len(trainer.processing_class) - 1
    trainer.train_dataset = [row] * 16
    try:
        trainer.train()
    except IndexError as error:
        return str(error)
    return "accepted"


def test_a_token_that_is_added_later_is_an_error_as_in_one_process(
    two_ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    expected = _added_later(folder, tmp_path / "alone", None)
    assert "out of range" in expected
    for axes in ({"tp": 2}, {"dp_shard": 2}):
        assert two_ranks.run(_added_later, folder, tmp_path / "mesh", axes) == [expected] * 2


def _evaluated_first(folder: Path, output: Path, axes: dict[str, int] | None) -> Outcome:
    """A trainer that evaluates before it trains."""
    forget_accelerate()
    model, mesh = model_on(folder, axes)
    trainer = build(model, mesh, dp_size(axes), output=str(output), metrics=True)
    evaluation = trainer.evaluate()
    trainer.train()
    weights = {name: tensor.detach().clone() for name, tensor in stream_weights(trainer.model)}
    return Outcome(trainer.state.log_history, weights, "", evaluation)


def test_evaluation_before_training_changes_nothing(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    found = four_ranks.run(_evaluated_first, folder, tmp_path / "mesh", {"dp_shard": 2, "tp": 2}, timeout=400)[0]
    expected = _evaluated_first(folder, tmp_path / "alone", None)
    assert differences(found, expected) == {}
    for key in ("eval_loss", "eval_accuracy"):
        assert found.evaluation[key] == pytest.approx(expected.evaluation[key], rel=1e-5)


def _worker_ranks(folder: Path, output: Path) -> int:
    """The rank that the data loader's workers are seeded by."""
    forget_accelerate()
    model, mesh = model_on(folder, {"dp_shard": 2, "tp": 2})
    arguments = TrainingArguments(**{**COMMON, "output_dir": str(output), "dataloader_num_workers": 1})
    trainer = Trainer(model=model, mesh=mesh, args=arguments, train_dataset=token_rows())
    seeded: int = trainer.get_train_dataloader().base_dataloader.worker_init_fn.keywords["rank"]
    return seeded


def test_workers_are_seeded_by_their_rank_on_dp(four_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    assert four_ranks.run(_worker_ranks, folder, tmp_path) == [0, 0, 1, 1]


def test_one_process_alone_may_use_it_too(folder: Path, tmp_path: Path) -> None:
    set_up = partial(build, output=str(tmp_path))
    assert differences(train(set_up, folder, {"tp": 1}), train(set_up, folder, None)) == {}


def test_losses_are_finite_where_no_label_is_left(folder: Path) -> None:
    from fsdp_runtime.trainers.logits import per_position

    logits, targets = torch.randn(2, 1, 7, requires_grad=True), torch.full((2, 5), -100)
    fields = per_position(logits, targets, temperature=1.0, fields=("log_probs", "entropy", "is_top1"))
    fields["log_probs"].sum().backward()
    assert fields["log_probs"].shape == (2, 5)
    assert logits.grad is not None
    assert not logits.grad.any()
    assert math.isfinite(float(fields["entropy"].sum()))


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from fsdp_runtime import trainers

    monkeypatch.delitem(vars(trainers), "SFTTrainer", raising=False)  # kept from an earlier use
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "fsdp_runtime.trainers.trl_classes", raising=False)
    with pytest.raises(BackendError, match=r"pip install 'fsdp-runtime\[trl\]'"):
        _ = trainers.SFTTrainer


def measured(folder: Path, axes: Mapping[str, int], output: str) -> list[dict[str, Any]]:
    """What a trainer logs of four optimizer steps, of which every second one is logged."""
    forget_accelerate()
    model, mesh = model_on(folder, axes)
    options = {"logging_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 2}
    trainer = build(model, mesh, dp_size(axes), output=output, **options)
    trainer.train()
    history: list[dict[str, Any]] = trainer.state.log_history
    return history


def test_logged_steps_have_speed_tokens_and_traffic(folder, tmp_path, four_ranks):
    axes = {"dp_shard": 2, "tp": 2}
    rows = [sum(row["attention_mask"]) for row in token_rows()]
    for history in four_ranks.run(measured, folder, axes, str(tmp_path), timeout=400):
        logged = [entry for entry in history if "loss" in entry]
        assert len(logged) == 2
        for entry in logged:
            assert entry["seconds"] > 0
            tokens = entry["tokens_per_second"] * entry["seconds"]
            assert min(rows) * BATCH <= round(tokens) <= max(rows) * BATCH
            assert {"seconds/forward_backward", "seconds/optimizer", "tflops_per_second_per_rank"} <= entry.keys()
        assert logged[0]["bytes_sent/tp"] > 0
        assert logged[0]["bytes_sent/dp_shard"] > 0
