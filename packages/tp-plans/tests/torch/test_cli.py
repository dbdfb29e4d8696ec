"""The commands that build a model on the meta device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.models import tiny_config
from tp_plans import plan_for
from tp_plans.cli import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with nothing but the config of a tiny Qwen 3."""
    config = tiny_config("Qwen3ForCausalLM", num_key_value_heads=2)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    return tmp_path


def test_a_plan_that_fits_exits_with_0(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(checkpoint), "--tp", "2", "--sequence-parallel"]) == 0
    assert capsys.readouterr().out == "Qwen3ForCausalLM fits the model at tp=2\n"


def test_a_bare_config_file_is_enough(checkpoint: Path) -> None:
    assert main(["check", str(checkpoint / "config.json"), "--tp", "2"]) == 0


def test_heads_that_do_not_divide_exit_with_1_and_name_the_sizes_that_do(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(checkpoint), "--tp", "4"]) == 1
    out = capsys.readouterr().out
    assert "k_proj: 2 heads of 16 (32 features) cannot be split over tp=4" in out
    assert out.count("use a tp out of 1, 2\n") == 2  # keys and values


def test_a_plan_from_a_file_is_checked(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkpoint / "plan.json"
    file.write_text(plan_for("llama").with_prefix("wrong").to_json())
    assert main(["check", str(checkpoint), "--tp", "2", "--plan", str(file)]) == 1
    assert "the pattern matches no module" in capsys.readouterr().out


def test_remote_code_is_refused_by_name(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["RemoteForCausalLM"]}))
    assert main(["check", str(checkpoint), "--tp", "2"]) == 2
    assert "its architectures are RemoteForCausalLM, none of which transformers" in capsys.readouterr().err


def test_a_missing_file_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere", "--tp", "2"]) == 2
    assert "nowhere: no such file" in capsys.readouterr().err


def test_our_plan_and_the_shipped_one_differ_only_in_what_ours_adds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "hf:Qwen3ForCausalLM", "Qwen3ForCausalLM"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {line.rpartition(".")[0] and line[0] for line in lines} == {"+"}


def test_an_unknown_class_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "hf:NoSuchModel"]) == 2
    assert "has no model class 'NoSuchModel'" in capsys.readouterr().err
