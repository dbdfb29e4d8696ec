"""The command line without torch: what is printed, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tp_plans import Plan, architectures, plan_for
from tp_plans.cli import main


def test_list_has_a_line_for_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["architecture", "model", "type", "notes"]
    assert [line.split()[0] for line in lines] == [entry.class_name for entry in architectures()]


def test_list_is_filtered_by_name_type_or_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "VISION", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["architecture"] == "Gemma3ForConditionalGeneration"


def test_show_as_json_reads_back_to_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "llama", "--sequence-parallel", "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out) == plan_for("llama", sequence_parallel=True)


def test_show_prints_a_line_for_every_rule_and_no_colours_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "llama"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1 + len(plan_for("llama"))
    assert "\x1b" not in out


def test_colours_are_for_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["diff", "qwen3", "qwen2"]) == 1
    assert capsys.readouterr().out.startswith("\x1b[31m- model.layers.*.self_attn.q_norm")


def test_diff_finds_what_is_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan_for("qwen3").override({"lm_head": None}).to_json())
    assert main(["diff", "qwen3", str(file)]) == 1
    assert capsys.readouterr().out.startswith("- lm_head: ColwiseParallel(")
    assert main(["diff", str(file), str(file)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "qwen"], "did you mean qwen3"),
        (["show", "missing.json"], "cannot read the plan missing.json: No such file"),
    ],
)
def test_a_failed_command_says_why_and_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_broken_file_is_named_as_the_plan_that_it_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{")
    assert main(["show", str(file)]) == 2
    assert "not JSON" in capsys.readouterr().err


def test_list_and_show_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from tp_plans.cli import main; main(['list']); main(['show', 'gemma3']);"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
