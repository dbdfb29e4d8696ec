"""The example scripts of trainers, as a user starts them; run by ``nox -s trainers``."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness import pages
from harness.ranks import RankPool
from harness.torchrun import torchrun
from harness.trainers import COMMON, forget_accelerate, token_rows, write_checkpoint

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "trainer.md"
ACCELERATE = GUIDE.with_name("accelerate.md")
FOLDER = Path(__file__).parents[4] / "docs" / "examples" / "trainer"


def figures(printed: str) -> list[dict[str, Any]]:
    """The dicts that a trainer prints, one a line."""
    found = [ast.literal_eval(line) for line in printed.splitlines() if line.startswith("{")]
    return [{name: float(value) for name, value in entry.items() if value is not None} for entry in found]


def run(script: str, output: Path, *arguments: str) -> list[dict[str, Any]]:
    done = torchrun(FOLDER / script, f"--output={output}", *arguments, ranks=4, cwd=FOLDER, timeout=500)
    assert done.returncode == 0, done.stderr
    return figures(done.stdout)


@pytest.mark.parametrize(("script", "steps"), [("train.py", 40), ("sft.py", 60), ("loop.py", 40)])
def test_the_loss_falls_and_the_model_is_saved(tmp_path: Path, script: str, steps: int) -> None:
    losses = [entry["loss"] for entry in run(script, tmp_path, f"--steps={steps}") if "loss" in entry]
    assert len(losses) == steps // 5  # one rank prints
    assert losses[-1] < 0.6 * losses[0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path) is not None


def test_the_reward_rises(tmp_path: Path) -> None:
    rewards = [entry["reward"] for entry in run("grpo.py", tmp_path) if "reward" in entry]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])
    assert AutoModelForCausalLM.from_pretrained(tmp_path) is not None


def test_ranks_that_accelerate_does_not_count_are_refused_with_the_fix(tmp_path: Path) -> None:
    text = (FOLDER / "train.py").read_text()
    (tmp_path / "tiny.py").write_text((FOLDER / "tiny.py").read_text())
    (tmp_path / "train.py").write_text(text.replace('use_cpu=mesh.device_type == "cpu",', ""))
    done = torchrun(tmp_path / "train.py", f"--output={tmp_path}", ranks=2, cwd=tmp_path, timeout=500)
    assert done.returncode != 0
    assert "accelerate counts 1 processes and the mesh has 2 ranks" in done.stderr
    assert "use_cpu=True" in done.stderr


def _guide(folder: Path) -> list[int]:
    """The guide's code, with the names that its text explains."""
    import transformers

    from fsdp_runtime import MeshSpec, load_weights, meta_device, parallelize, trainers

    forget_accelerate()
    names: dict[str, Any] = {
        **vars(trainers),
        "Trainer": trainers.Trainer,
        "MeshTrainerMixin": trainers.MeshTrainerMixin,
        "TheirTrainer": transformers.Trainer,
        "MeshSpec": MeshSpec,
        "load_weights": load_weights,
        "meta_device": meta_device,
        "parallelize": parallelize,
        "AutoConfig": transformers.AutoConfig,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "path": str(folder),
        "arguments": transformers.TrainingArguments(output_dir=str(folder), max_steps=2, **COMMON),
        "dataset": token_rows(),
        "__name__": "page",
    }
    pages.run(pages.blocks(GUIDE, "py"), names)
    return [entry["step"] for entry in names["trainer"].state.log_history if "loss" in entry]


def _accelerate_guide(folder: Path, output: str) -> list[bool]:
    from torch.utils.data import DataLoader

    from fsdp_runtime import MeshSpec, trainers

    forget_accelerate()
    rows = [{name: torch.tensor(value) for name, value in row.items()} for row in token_rows()]
    names: dict[str, Any] = {
        "MeshAccelerator": trainers.MeshAccelerator,
        "MeshSpec": MeshSpec,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "torch": torch,
        "path": str(folder),
        "folder": output,
        "loader": DataLoader(rows, batch_size=2),
        "__name__": "page",
    }
    pages.run(pages.blocks(ACCELERATE, "py"), names)
    return [bool(names["loss"].isfinite())]


def test_the_lines_of_the_guide_to_accelerate_run(four_ranks: RankPool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "in")
    assert four_ranks.run(_accelerate_guide, folder, str(tmp_path / "out")) == [[True]] * 4
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


def test_the_lines_of_the_guide_run(four_ranks: RankPool, tmp_path: Path) -> None:
    assert four_ranks.run(_guide, write_checkpoint(tmp_path)) == [[1, 2]] * 4
