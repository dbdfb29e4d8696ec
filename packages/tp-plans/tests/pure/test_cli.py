"""The command line without torch: what is printed, and the exit codes."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tp_plans import Plan, architectures, plan_for
from tp_plans.cli import main


def test_list_has_a_line_for_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    header, *lines, blank, footer = capsys.readouterr().out.splitlines()
    assert header.split() == ["architecture", "model", "type", "TP", "SP", "MoE", "notes"]
    assert (blank, "tp-plans show hf:CLASS" in footer) == ("", True)
    assert all(line.split()[2:5] == ["yes", "yes", "no"] for line in lines if line.startswith("Llama"))
    assert [line.split()[0] for line in lines] == [entry.class_name for entry in architectures()]


def test_list_is_filtered_by_name_type_or_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "VISION", "--json"]) == 0
    row, *others = json.loads(capsys.readouterr().out)
    assert all("vision" in "".join(map(str, each.values())).lower() for each in (row, *others))
    assert len(others) + 1 < len(architectures())
    assert set(row) == {"architecture", "model_type", "sequence_parallel", "experts", "notes"}


def test_list_tells_what_an_architecture_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    unable = [entry.class_name for entry in architectures() if not entry.sequence_parallel]
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-2] if line.split()[3] == "no"] == unable
    assert main(["show", unable[0], "--sequence-parallel"]) == 2
    assert "has no sequence-parallel form" in capsys.readouterr().err


def test_show_as_json_reads_back_to_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "llama", "--sequence-parallel", "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out) == plan_for("llama", sequence_parallel=True)


def test_show_prints_a_line_for_every_rule_and_no_colours_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "llama"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1 + len(plan_for("llama"))
    assert "\x1b" not in out
    assert re.search(r"^model\.layers\.\*\.mlp\.up_proj +ColwiseParallel\(\)$", out, flags=re.MULTILINE)


def test_colours_are_for_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["show", "qwen3"]) == 0
    assert capsys.readouterr().out.startswith("\x1b[1m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["show", "qwen3"]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "qwen"], "did you mean qwen3"),
        (["show", "Qwen3MoeForCausalLM"], "tp-plans show hf:Qwen3MoeForCausalLM"),
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "an object with an object 'rules'"),
        (b'{"format": 1, "rules": {"a/b": {"style": "NoParallel"}}}', "'a/b' is not a module path"),
        (b'{"format": 1, "rules": {"a": {"style": "NoParallel"}, "a": {"style": "NoParallel"}}}', "duplicate key 'a'"),
        (b'{"format": 1, "rules": {"a": {"style": "Colwise"}}}', "'Colwise' is not a style"),
        (b'{"format": 1, "rules": {"a": {"style": "SequenceParallel", "sequence_dim": "x"}}}', "sequence_dim is 'x'"),
        (
            b'{"format": 1, "rules": {"a": {"style": "RowwiseParallel", "input_layouts": "shard(0)"}}}',
            "write Shard(-1)",
        ),
        (b"\xff\xfe\x00", "cannot read the plan"),
    ],
)
def test_a_file_that_holds_no_plan_is_refused_with_what_is_wrong(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    assert main(["show", str(file)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_list_and_show_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from tp_plans.cli import main; main(['list']); main(['show', 'gemma3']);"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["--version"])
    assert exit_code.value.code == 0
    assert capsys.readouterr().out == f"tp-plans {importlib.metadata.version('tp-plans')}\n"
