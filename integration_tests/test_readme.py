"""What the README shows runs as it stands there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from transformers import AutoModelForCausalLM

from harness import pages
from harness.models import tiny_model
from harness.torchrun import torchrun

README = Path(__file__).parents[1] / "README.md"
TRAINER, PLAN = pages.blocks(README, "python")


def test_the_trainer_takes_a_step_and_saves_a_checkpoint(tmp_path: Path) -> None:
    tiny_model("Qwen3ForCausalLM", num_hidden_layers=1).float().save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "train.py").write_text(TRAINER.text)
    job = torchrun("train.py", "checkpoint", ranks=4, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert re.findall(r"^step (\d): loss [\d.]+, gradient norm [\d.]+$", job.stdout, re.MULTILINE) == ["0", "1", "2"]
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("checkpoint", "tuned"))
    changed = [not old.equal(new) for old, new in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)


def test_the_plan_alone_prints_what_the_comment_says() -> None:
    assert pages.run([PLAN], {}) == []


def _session_names() -> set[str]:
    """Return the names of the noxfile's sessions, as ``nox -l`` lists them."""
    names = set()
    for node in ast.parse((README.parent / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and "nox.session" in "".join(map(ast.unparse, node.decorator_list)):
            renamed = re.search(r"name='(\w+)'", "".join(map(ast.unparse, node.decorator_list)))
            names.add(renamed[1] if renamed else node.name)
    return names


def test_the_table_of_sessions_has_every_session_of_the_noxfile() -> None:
    table = README.read_text().partition("## Sessions")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == _session_names()
