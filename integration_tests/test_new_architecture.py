"""The guide to a plan for a new architecture, followed word for word: its files, commands and outputs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from harness.interpreter import environment
from harness.torchrun import own_lines

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "plans.md"
GUIDE = PAGE.read_text().partition("## A plan for a new architecture")[2]
FILES = dict(re.findall(r'```py title="(\S+)"\n(.*?)```', GUIDE, flags=re.DOTALL))
STEPS = re.findall(r"```bash\n(.*?)```\n\n```text\n(.*?)```", GUIDE, flags=re.DOTALL)


def said(command: str, folder: Path) -> str:
    """Return the output of a command of the guide in a folder, with the programs of this environment."""
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return own_lines(done.stdout)


def test_guide_commands_print_the_shown_output(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert len(STEPS) == GUIDE.count("```bash") == 2
    for command, expected in STEPS:
        assert said(command, tmp_path) == expected


def test_the_plan_is_one_file_of_about_twenty_lines() -> None:
    code = [line for line in FILES["stablelm_plan.py"].splitlines() if line.strip()]
    assert len(code) <= 22
    assert f"`{'`, `'.join(FILES)}`" == "`look.py`, `stablelm_plan.py`, `prove.py`"


def test_transformers_has_no_plan_for_the_model_of_the_guide() -> None:
    from transformers import StableLmConfig

    assert getattr(StableLmConfig, "base_model_tp_plan", None) is None
