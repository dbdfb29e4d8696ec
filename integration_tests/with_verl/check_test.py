"""``fsdp-runtime verl-check`` beside verl: all is fine, a plug-in is broken, a flag is not known."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fsdp_runtime.trainers.verl import flags
from fsdp_runtime.trainers.verl.check import check

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "verl.md"


def _command(*folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command with this process's import path, and some folders before it."""
    command = [sys.executable, "-W", "ignore", "-m", "fsdp_runtime.cli", "verl-check"]
    paths = {"PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, sys.path)])}
    return subprocess.run(command, env=os.environ | paths | environment, capture_output=True, text=True, timeout=600)


def test_check_finds_all() -> None:
    job = _command(VERL_USE_EXTERNAL_MODULES="with_verl.cpu_platform")
    assert job.returncode == 0, job.stdout + job.stderr
    lines = job.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"ok"}
    assert "ok      verl runs on cpu" in lines


def test_a_plugin_that_verl_swallowed_is_named_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('the wheel is for another CUDA')\n")
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nbroken = broken_plugin\n")
    job = _command(tmp_path)
    assert job.returncode == 1
    (line,) = [line for line in job.stdout.splitlines() if line.startswith("error")]
    assert "plug-in broken (broken_plugin) fails" in line
    assert "RuntimeError: the wheel is for another CUDA" in line


def test_a_policy_that_leaves_the_engine_out_is_an_error() -> None:
    job = _command(VERL_USE_EXTERNAL_PLUGINS="none")
    assert job.returncode == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none leaves out fsdp_runtime" in job.stdout


def test_every_flag_of_verl_is_known() -> None:
    assert flags.unknown_fields() == []


def test_a_new_flag_of_verl_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers import config

    @dataclass
    class EngineConfig(config.EngineConfig):  # type: ignore[misc]
        new_flag: bool = field(default=False)

    monkeypatch.setattr(config, "EngineConfig", EngineConfig)
    told = [finding for finding in check() if "new_flag" in finding.text]
    assert [finding.level for finding in told] == ["warning"]


def table_of_flags() -> list[str]:
    """The guide's table in Markdown: the flags of which there is something to say, once each."""
    rows: dict[str, flags.Flag] = {}
    for kind, known in flags.FLAGS.items():
        for name, flag in known.items():
            other = flag.text and rows.setdefault(flag.path(name), flag).state != flag.state
            if other:
                rows[f"{kind.removesuffix('Config').lower()}.{name}"] = flag
    body = [f"| `{name}` | {flag.state} | {flag.text} |" for name, flag in sorted(rows.items())]
    return ["| flag of verl | state | what it does here |", "|---|---|---|", *body]


def test_the_guide_has_the_table_of_flags() -> None:
    assert "\n".join(table_of_flags()) in GUIDE.read_text()
