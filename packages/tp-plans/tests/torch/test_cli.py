"""The commands that build a model on the meta device."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import Phi3Config

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
    assert main(["check", str(checkpoint), "--tp", "3"]) == 1
    out = capsys.readouterr().out
    assert "q_proj: 4 heads of 16 (64 features) cannot be split over tp=3" in out
    assert "use a tp out of 1, 2, 4\n" in out
    assert out.endswith("valid tp sizes for this plan: 1, 2, 4\n")


def test_a_plan_from_a_file_is_checked(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkpoint / "plan.json"
    file.write_text(plan_for("llama").with_prefix("wrong").to_json())
    assert main(["check", str(checkpoint), "--tp", "2", "--plan", str(file)]) == 1
    assert "the pattern matches no module" in capsys.readouterr().out


def test_remote_code_is_refused_by_name(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["RemoteForCausalLM"]}))
    assert main(["check", str(checkpoint), "--tp", "2"]) == 2
    told = capsys.readouterr().err
    assert "its architectures are RemoteForCausalLM, and transformers" in told
    assert "remote code is not run" in told


def test_a_config_that_names_no_class_means_the_one_for_text_generation(checkpoint: Path) -> None:
    change(checkpoint, architectures=None)
    assert main(["check", str(checkpoint), "--tp", "2"]) == 0


def change(checkpoint: Path, **fields: object) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read it"),
        ("[]", "cannot read it"),
        ('{"hidden_size": 8}', "cannot read it"),
        ('{"model_type": "nobody"}', "cannot read it"),
        ('{"model_type": "vit"}', "it names no architectures"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "wide"),
        ('{"model_type": "llama", "vocab_size": -4}', "no LlamaForCausalLM can be built from it"),
    ],
)
def test_a_config_without_what_is_needed_exits_with_2_and_says_so(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["check", str(tmp_path), "--tp", "2"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_explain_tells_totals_and_placements(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(checkpoint), "--tp", "2", "--sequence-parallel"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("<Plan Qwen3ForCausalLM: TP + SP")
    assert "  weight [96, 64] -> [48, 64], shard(0) (x 2)" in out
    assert main(["explain", str(checkpoint), "--tp", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tp"] == 2


def test_suggest_command_writes_a_plan_that_check_reads(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suggest", str(checkpoint)]) == 0
    assert "doubts" not in capsys.readouterr().out
    assert main(["suggest", str(checkpoint), "--json"]) == 0
    plan = checkpoint / "plan.json"
    plan.write_text(capsys.readouterr().out)
    assert main(["check", str(checkpoint), "--tp", "2", "--plan", str(plan)]) == 0


def test_the_doubts_of_a_suggestion_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Phi3Config(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=130, pad_token_id=0)
    config.architectures = ["Phi3ForCausalLM"]
    config.save_pretrained(tmp_path)
    assert main(["suggest", str(tmp_path)]) == 0
    assert "doubts: model.layers.*.self_attn.qkv_proj: assumed to be queries, keys" in capsys.readouterr().out


def test_check_command_exits_with_2_for_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere", "--tp", "2"]) == 2
    assert "nowhere: no such file" in capsys.readouterr().err


def test_show_command_exits_with_2_for_an_unknown_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "hf:NoSuchModel"]) == 2
    assert "has no model class 'NoSuchModel'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cohere", "CohereForCausalLM", "gpt2", "GPT2LMHeadModel", "bert", "NoSuchModel"])
def test_show_hints_at_a_command_that_works(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", name]) == 2
    told = capsys.readouterr().err
    hinted = re.findall(r"tp-plans show (hf:\w+)", told)
    assert bool(hinted) == name.lower().startswith("cohere")
    assert bool(hinted) != ("ships none either: tp-plans suggest CONFIG_OR_DIR" in told)
    for plan in hinted:
        assert main(["show", plan]) == 0
