"""What the README shows runs as it stands there."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM

from harness import pages
from harness.models import tiny_model
from harness.torchrun import torchrun

README = Path(__file__).parents[1] / "README.md"
TRAINER, PLAN = pages.blocks(README, "python")


def test_the_trainer_takes_a_step_and_saves_a_checkpoint(tmp_path: Path) -> None:
    tiny_model("Qwen3ForCausalLM").float().save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "train.py").write_text(TRAINER.text)
    job = torchrun("train.py", "checkpoint", ranks=4, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("checkpoint", "tuned"))
    changed = [not old.equal(new) for old, new in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)


def test_the_plan_alone_prints_what_the_comment_says() -> None:
    assert pages.run([PLAN], {}) == []
