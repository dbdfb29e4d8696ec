"""TRL's trainers that sample, with sequences divided over ranks, against one process; run by ``nox -s trainers``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

from fsdp_runtime import OptionError
from fsdp_runtime.trainers._trl_compat import replaced
from harness.parity import mesh_for
from harness.ranks import RankPool
from harness.trainers import (
    Outcome,
    adapted_as_on_a_mesh,
    compare,
    differences,
    dp_size,
    forget_accelerate,
    model_on,
    write_checkpoint,
)
from harness.trl_trainers import build, trainers

#: Hybrids with delta nets and with convolutions, and attention with sinks and sliding windows.
FAMILIES = (
    "Qwen3_5ForCausalLM",
    "Lfm2ForCausalLM",
    "GptOssForCausalLM",
    "Gemma3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3MoeForCausalLM",
)
CHANGES: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {"router_aux_loss_coef": 0.0, "sliding_window": 4},
    "Qwen3NextForCausalLM": {"router_aux_loss_coef": 0.0, "output_router_logits": False},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
}
METHODS = ("allgather", "ulysses", "ring")
VARIANTS: dict[str, dict[str, Any]] = {
    "a loss of tokens": {"loss_type": "dapo"},
    "a loss of sequences": {"loss_type": "grpo", "beta": 0.0},
    "a loss of the longest completion": {"loss_type": "dr_grpo"},
    "several updates": {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 4},
    "ratios of sequences": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "a temperature and an entropy's quantile": {"temperature": 0.7, "top_entropy_quantile": 0.5},
    "a reference that follows": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "a loss of a batch's tokens": {"loss_type": "bnpo"},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense"))


def _compare(
    pool: RankPool,
    name: str,
    folder: Path,
    axes: dict[str, int],
    output: Path,
    *,
    parallel: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    teacher = None
    if name in ("GKD", "Distillation"):
        teacher = str(write_checkpoint(output / "teacher", seed=1))
    set_up = partial(build, name=name, output=str(output), teacher=teacher, **options)
    found, expected = compare(pool, set_up, folder, axes, parallel=parallel, key=f"cp {name} {folder} {options}")
    assert min(expected.logged("grad_norm")) > 0.01
    figures = () if options.keys() & {"beta", "gradient_accumulation_steps"} else trainers()[name][-1]
    assert differences(found, expected, ("loss", "grad_norm", *figures)) == {}


@pytest.mark.parametrize(
    "architecture", [*FAMILIES[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[3:])]
)
def test_grpo_of_every_family_is_that_of_one_process(two_ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    folder = write_checkpoint(tmp_path / "model", architecture=architecture, **CHANGES.get(architecture, {}))
    _compare(two_ranks, "GRPO", folder, {"cp": 2}, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RLOO", "GRPO", "GMPO", "GKD", "Distillation"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_trainer_of_every_family_is_that_of_one_process(
    two_ranks: RankPool, tmp_path: Path, architecture: str, name: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", architecture=architecture, **CHANGES.get(architecture, {}))
    _compare(two_ranks, name, folder, {"cp": 2}, tmp_path / "out")


@pytest.mark.parametrize(
    "variant",
    [*list(VARIANTS)[3:4], *(pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS if "several" not in n)],
)
def test_grpo_with_every_option_is_that_of_one_process(
    two_ranks: RankPool, dense: Path, tmp_path: Path, variant: str
) -> None:
    _compare(two_ranks, "GRPO", dense, {"cp": 2}, tmp_path, **VARIANTS[variant])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("name", ["GRPO", "Distillation"])
def test_they_are_by_every_method(two_ranks: RankPool, dense: Path, tmp_path: Path, name: str, method: str) -> None:
    _compare(two_ranks, name, dense, {"cp": 2}, tmp_path, parallel={"context_parallel": method})


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2}, {"cp": 4}], ids=str)
@pytest.mark.parametrize("name", ["GRPO", "GKD", "Distillation"])
def test_they_are_on_every_mesh(
    four_ranks: RankPool, dense: Path, tmp_path: Path, name: str, axes: dict[str, int]
) -> None:
    _compare(four_ranks, name, dense, axes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RLOO", "GRPO", "GKD", "Distillation"])
def test_they_are_with_activation_checkpointing(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "model", architecture="Qwen3_5ForCausalLM")
    _compare(two_ranks, name, folder, {"cp": 2}, tmp_path / "out", gradient_checkpointing=True)


def _evaluated(folder: Path, output: Path, axes: dict[str, int] | None) -> dict[str, float]:
    """Evaluate between two steps, with prompts of its own."""
    forget_accelerate()
    model, mesh = model_on(folder, axes)
    trainer = build(model, mesh, dp_size(axes), name="GRPO", output=str(output), eval_strategy="steps", eval_steps=1)
    trainer.train()
    return {f"{entry['step']} {name}": value for entry in trainer.state.log_history for name, value in entry.items()}


def test_an_evaluation_between_steps_is_that_of_one_process(two_ranks: RankPool, dense: Path, tmp_path: Path) -> None:
    found = two_ranks.run(_evaluated, dense, tmp_path / "mesh", {"cp": 2}, timeout=200)[0]
    expected = _evaluated(dense, tmp_path / "alone", None)
    for name in ("1 eval_loss", "1 eval_reward", "1 eval_kl", "2 loss", "2 grad_norm"):
        assert found[name] == pytest.approx(expected[name], abs=2e-5), name


@pytest.mark.slow
def test_they_are_with_sequence_parallelism(four_ranks: RankPool, dense: Path, tmp_path: Path) -> None:
    for name in ("GRPO", "Distillation"):
        _compare(four_ranks, name, dense, {"cp": 2, "tp": 2}, tmp_path / name, parallel={"sequence_parallel": True})


def _adapted(folder: Path, output: Path, axes: dict[str, int] | None, name: str) -> Outcome:
    """Train the adapter of a policy, whose base is the reference."""
    forget_accelerate()
    mesh = None if axes is None else mesh_for(axes)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    teacher = str(write_checkpoint(output / "teacher", seed=1)) if name == "Distillation" else None
    with replaced(trainers()[name][0], {"get_peft_model": adapted_as_on_a_mesh} if mesh is None else {}):
        trainer = build(
            str(folder), mesh, dp_size(axes), name=name, output=str(output), peft_config=lora, teacher=teacher
        )
    trainer.train()
    trainer.save_model(str(output / "saved"))
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    saved = peft.PeftModel.from_pretrained(base, output / "saved").state_dict()
    return Outcome(trainer.state.log_history, saved, "")


@pytest.mark.parametrize("name", ["GRPO", pytest.param("Distillation", marks=pytest.mark.slow)])
def test_an_adapter_of_a_policy_trains_as_in_one_process(
    two_ranks: RankPool, dense: Path, tmp_path: Path, name: str
) -> None:
    found = two_ranks.run(_adapted, dense, tmp_path / "mesh", {"cp": 2}, name, timeout=200)[0]
    expected = _adapted(dense, tmp_path / "alone", None, name)
    assert differences(found, expected, ("loss", "grad_norm", *trainers()[name][-1])) == {}


def _routers(folder: Path, output: Path) -> list[str]:
    """What trainers say at construction of a mixture with the auxiliary loss of its routers."""
    forget_accelerate()
    model, mesh = model_on(folder, {"cp": 2})
    said = []
    for name, options in (("GRPO", {}), ("DPO", {}), ("SFT", {}), ("SFT", {"padding_free": True, "max_length": None})):
        try:
            build(model, mesh, 1, name=name, output=str(output), router_aux_loss_coef=0.1, **options)
            said.append("")
        except OptionError as error:
            said.append(str(error))
    return said


def test_losses_of_routers_beside_padding_are_refused_first(two_ranks: RankPool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", architecture="Qwen3NextForCausalLM")
    for said in two_ranks.run(_routers, folder, tmp_path / "out"):
        assert ["router_aux_loss_coef=0.0" in each for each in said] == [True, True, True, False]
