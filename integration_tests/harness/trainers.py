"""Checkpoints, a tokenizer and datasets for tests of trainers, and one run of a trainer on any mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime import init_adapters, load_weights, meta_device, parallelize, stream_weights
from harness.models import VOCAB, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

#: What every trainer of the tests is told: no reports, and an optimizer in whose steps small gradients stay small.
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "adam_epsilon": 1e-3,
    "max_grad_norm": 0.5,
    "save_strategy": "no",
    "bf16": False,
}
#: Samples of an optimizer step, whatever the mesh.
BATCH = 4


@dataclass
class Outcome:
    """What a run of a trainer showed.

    Args:
        history: the trainer's log.
        weights: every weight at the end, by its name in the checkpoint.
        wrapper: the name of the class of what the trainer calls.
        evaluation: what ``evaluate`` returned at the end, if it was asked for.
    """

    history: list[dict[str, Any]]
    weights: dict[str, Tensor] = field(repr=False)
    wrapper: str
    evaluation: dict[str, float] = field(default_factory=dict)

    def logged(self, key: str) -> list[float]:
        """The values of one figure, in order."""
        return [entry[key] for entry in self.history if key in entry]


def write_checkpoint(folder: Path, *, architecture: str = "Qwen3ForCausalLM", seed: int = 0, **options: Any) -> Path:
    """Write a tiny float32 checkpoint and a tokenizer of words ``t0`` to ``t130``."""
    model: Any = tiny_model(architecture, dtype=torch.float32, seed=seed, **options)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    """A tokenizer whose words are ``t0`` to ``t130``; the first three are padding, beginning and end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="t0",
        bos_token="t1",
        eos_token="t2",
        unk_token="t3",
        padding_side="left",
        chat_template="{% for m in messages %}{{ m.content }} {% endfor %}",
    )


def with_low_rank_adapters(folder: Path) -> Any:
    """Return a checkpoint's model with adapters that change its outputs."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def adapted_as_on_a_mesh(model: Any, config: Any, **options: Any) -> Any:
    """In the place of peft's ``get_peft_model`` in one process: factors as a trainer on a mesh draws a path's."""
    import peft

    adapted: Any = peft.get_peft_model(model, config, **options)
    init_adapters(adapted, seed=42)
    return adapted


def token_rows(count: int = 16, *, seed: int = 0) -> list[dict[str, list[int]]]:
    """Samples of 5 to 11 tokens, padded to 11, of which some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = 5 + index % 7
        ids = torch.randint(4, VOCAB, (length,), generator=generator).tolist()
        padding = [0] * (11 - length)
        rows.append(
            {
                "input_ids": ids + padding,
                "labels": [-100] * (index % 3) + ids[index % 3 :] + [-100] * len(padding),
                "attention_mask": [1] * length + padding,
            }
        )
    return rows


def model_on(folder: Path, axes: Mapping[str, int] | None, **options: Any) -> tuple[Any, Any]:
    """The checkpoint as a model on a mesh, and the mesh; without axes, plain, and ``None``."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, dtype=torch.float32)
    auto = transformers.AutoModelForCausalLM
    if config.architectures[0].endswith("ForSequenceClassification"):
        auto = transformers.AutoModelForSequenceClassification
    elif config.architectures[0].endswith("ForConditionalGeneration"):
        auto = transformers.AutoModelForImageTextToText
    if axes is None:
        return auto.from_pretrained(folder, dtype=torch.float32), None
    mesh = mesh_for(axes)
    with meta_device():
        model = auto.from_config(config)
    parallelize(model, mesh, **options)
    load_weights(model, folder)
    return model, mesh


def dp_size(axes: Mapping[str, int] | None) -> int:
    """How many different batches the ranks of a mesh take."""
    sizes = axes or {}
    return sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)


def forget_accelerate() -> None:
    """Drop what accelerate remembers of an earlier trainer of this process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
        os.environ.pop(name, None)
    if "WORLD_SIZE" in os.environ:
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # as torchrun does


def train(
    build: Callable[..., Any],
    folder: Path,
    axes: Mapping[str, int] | None,
    *,
    resume: Any = None,
    evaluate: bool = False,
    save_to: Path | None = None,
    **options: Any,
) -> Outcome:
    """Train as ``build(model, mesh, dp)`` sets it up; runs on every rank, or in a process without a mesh.

    Args:
        build: returns a trainer; ``mesh`` is ``None`` for the trainer of one process.
        folder: the checkpoint.
        axes: the mesh, or ``None``.
        resume: what ``train`` gets as ``resume_from_checkpoint``.
        evaluate: also evaluate at the end.
        save_to: also call ``save_model`` with this folder.
        options: for ``parallelize``.
    """
    forget_accelerate()
    model, mesh = model_on(folder, axes, **options)
    trainer = build(model, mesh, dp_size(axes))
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: tensor.detach().clone() for name, tensor in stream_weights(trainer.model)}
    evaluation = trainer.evaluate() if evaluate else {}
    if save_to is not None:
        trainer.save_model(str(save_to))
    return Outcome(trainer.state.log_history, weights, type(trainer.model_wrapped).__name__, evaluation)


#: Outcomes of one process, so that tests on several meshes share them.
_EXPECTED: dict[str, Outcome] = {}


def compare(
    pool: RankPool,
    build: Callable[..., Any],
    folder: Path,
    axes: Mapping[str, int],
    *,
    parallel: Mapping[str, Any] | None = None,
    evaluate: bool = False,
    key: str,
) -> tuple[Outcome, Outcome]:
    """Return the outcomes on a mesh and in one process; all ranks' are checked to be the same.

    Args:
        pool: the ranks.
        build: see :func:`train`; picklable.
        folder: the checkpoint.
        axes: the mesh.
        parallel: options of ``parallelize``.
        evaluate: see :func:`train`.
        key: names what one process computes; calls with the same key share it.
    """
    found = pool.run(train, build, folder, axes, evaluate=evaluate, timeout=400, **(parallel or {}))
    for other in found[1:]:
        if wrong := differences(other, found[0]):
            raise AssertionError(f"the ranks differ: {wrong}")
    if key not in _EXPECTED:
        _EXPECTED[key] = train(build, folder, None, evaluate=evaluate)
    return found[0], _EXPECTED[key]


def differences(found: Outcome, expected: Outcome, keys: tuple[str, ...] = ("loss", "grad_norm")) -> dict[str, float]:
    """Every figure and weight that is further from the expected one than rounding in float32 explains."""
    errors = {}
    for key in keys:
        ours, theirs = (torch.tensor(outcome.logged(key), dtype=torch.float64) for outcome in (found, expected))
        errors[key] = (ours - theirs).abs().max().item() if ours.shape == theirs.shape and len(theirs) else float("inf")
    for name, weight in expected.weights.items():
        errors[name] = (found.weights[name] - weight).abs().max().item()
    return {name: error for name, error in errors.items() if not error < 2e-5}
