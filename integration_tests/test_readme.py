"""What the README shows runs as it stands there, and CONTRIBUTING.md names every session."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from transformers import AutoModelForCausalLM

from harness import pages
from harness.models import tiny_model
from harness.torchrun import torchrun

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
(TRAINER,) = pages.blocks(README, "python")


def test_the_trainer_raises_its_reward_and_saves_a_checkpoint(tmp_path: Path) -> None:
    tiny_model("Qwen3ForCausalLM", num_hidden_layers=1).float().save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "train.py").write_text(TRAINER.text)
    job = torchrun("train.py", "checkpoint", ranks=4, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    line = r"^step \d+: reward ([\d.]+), gradient norm [\d.]+$"
    rewards = [float(reward) for reward in re.findall(line, job.stdout, re.MULTILINE)]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5  # of chance: 0.02 for the mean of five steps
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("checkpoint", "tuned"))
    changed = [not old.equal(new) for old, new in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)


def test_it_is_short_and_says_first_what_has_not_run() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert "never on more than one GPU" in "\n".join(lines[:20])


def test_its_two_commands_are_those_of_the_noxfile_and_of_continuous_integration() -> None:
    commands = re.findall(r"^    (python3 .*?) +#", README.read_text(), re.MULTILINE)
    install, *tests = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("python3")]
    assert commands == ["python3 -m pip install nox && python3 -m nox -s demo", " && ".join([install, *tests])]


def _session_names() -> set[str]:
    """Return the names of the noxfile's sessions, as ``nox -l`` lists them."""
    names = set()
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and "nox.session" in "".join(map(ast.unparse, node.decorator_list)):
            renamed = re.search(r"name='(\w+)'", "".join(map(ast.unparse, node.decorator_list)))
            names.add(renamed[1] if renamed else node.name)
    return names


def test_the_table_of_sessions_has_every_session_of_the_noxfile() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == _session_names()
